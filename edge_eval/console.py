"""How a command ends: a user's error is one line and exit code 1, an interrupt 130 or 143.

Both command files run through run_app(). Results go to stdout, progress and notes to stderr.
"""

import contextlib
import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from edge_eval.errors import EdgeEvalError

EXIT_USER_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class Interrupted(BaseException):
    """SIGINT or SIGTERM, as an exception so that files are closed on the way out."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


# What a terminal obeys instead of showing: control characters but tab and line feed, and the marks
# that turn the reading order of what stands around them.
_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Text with a mark in place of every character that a terminal would obey."""
    return _OBEYED.sub("\ufffd", text)


class _Console(Console):
    """Names and questions are strangers' texts: whatever is printed of them stays text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=harmless(segment.text))


class _Results(_Console):
    def on_broken_pipe(self) -> None:
        """Rich ends with 1 here; a reader that has enough is no error."""
        _end_quietly()


def _end_quietly() -> NoReturn:
    _let_go_of_stdout()
    sys.exit(0)


def _let_go_of_stdout() -> None:
    """Python writes what is left on its way out, where a failure would be told once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def results() -> Console:
    """The console for results."""
    return _Results(highlight=False, soft_wrap=False)


def notes() -> Console:
    """The console for progress, notes and errors."""
    return _Console(stderr=True, highlight=False)


def print_json(value: object) -> None:
    """One strict JSON document on stdout, in UTF-8 whatever the terminal's encoding."""
    write_text(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n")


def write_text(text: str) -> None:
    """Text on stdout in UTF-8; a reader that has enough (head, less) ends the process quietly.

    On a terminal it is made harmless; a file or a pipe gets it to the byte.
    """
    if sys.stdout.isatty():
        text = harmless(text)
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # a captured stdout
        sys.stdout.write(text)
        return
    try:
        sys.stdout.flush()
        buffer.write(text.encode("utf-8", "replace"))
        buffer.flush()
    except BrokenPipeError:
        _end_quietly()


def _tell(message: str) -> None:
    """One line on stderr, whatever the names in it hold."""
    notes().print(Text("Error: " + " ".join(message.splitlines())), soft_wrap=True)


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run a command line and leave the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A console that cannot show a letter shows a mark instead; nothing fails for it.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]

    def interrupt(number: int, _frame: object) -> None:
        raise Interrupted(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)

    # Not KeyboardInterrupt: typer would turn it into exit code 1.
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        app()
    except EdgeEvalError as error:
        _tell(str(error))
        sys.exit(EXIT_USER_ERROR)
    except MemoryError:
        _tell(
            "there is not enough memory for this. Close other programs, raise this process's "
            "limit, or take a smaller model or fewer questions (--limit). A run record keeps what "
            "was answered."
        )
        sys.exit(EXIT_USER_ERROR)
    except Interrupted as interrupted:
        notes().print("Interrupted; what was answered is kept.")
        sys.exit(interrupted.exit_code)
    except BrokenPipeError:
        _end_quietly()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _let_go_of_stdout()
        _tell(
            f"{where}{error.strerror}: make room, or write elsewhere. A run record keeps what was "
            "answered."
        )
        sys.exit(EXIT_USER_ERROR)
    sys.exit(0)
