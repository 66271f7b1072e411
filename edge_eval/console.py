"""How a command ends: a user's error is one line and exit code 1, an interrupt 130 or 143.

Both command files run through run_app(). Results go to stdout, progress and notes to stderr.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from edge_eval.errors import EdgeEvalError

EXIT_USER_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class Interrupted(BaseException):
    """SIGINT or SIGTERM, as an exception so that files are closed on the way out."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Results(Console):
    def on_broken_pipe(self) -> None:
        """Rich ends with 1 here; a reader that has enough is no error."""
        _end_quietly()


def _end_quietly() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def results() -> Console:
    """The console for results."""
    return _Results(highlight=False, soft_wrap=False)


def notes() -> Console:
    """The console for progress, notes and errors."""
    return Console(stderr=True, highlight=False)


def print_json(value: object) -> None:
    """One strict JSON document on stdout, in UTF-8 whatever the terminal's encoding."""
    write_text(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n")


def write_text(text: str) -> None:
    """Text on stdout in UTF-8; a reader that has enough (head, less) ends the process quietly."""
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
        notes().print(Text(f"Error: {error}"), soft_wrap=True)
        sys.exit(EXIT_USER_ERROR)
    except Interrupted as interrupted:
        notes().print("Interrupted; what was answered is kept.")
        sys.exit(interrupted.exit_code)
    except BrokenPipeError:
        _end_quietly()
    sys.exit(0)
