"""How a command ends: a user's error is one line and exit code 1, an interrupt 130 or 143.

Both command files run through run_app(). Results go to stdout, progress and notes to stderr.
"""

import contextlib
import json
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


class Terminated(BaseException):
    """SIGTERM, turned into an exception so that files are closed on the way out."""


def results() -> Console:
    """The console for results."""
    return Console(highlight=False, soft_wrap=False)


def notes() -> Console:
    """The console for progress, notes and errors."""
    return Console(stderr=True, highlight=False)


def print_json(value: object) -> None:
    """One strict JSON document on stdout, in UTF-8 whatever the terminal's encoding."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # a captured stdout
        sys.stdout.write(text)
    else:
        buffer.write(text.encode("utf-8"))
        buffer.flush()


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run a command line and leave the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A console that cannot show a letter shows a mark instead; nothing fails for it.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]

    def terminate(_signal: int, _frame: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        app()
    except EdgeEvalError as error:
        notes().print(Text(f"Error: {error}"), soft_wrap=True)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        notes().print("Interrupted.")
        sys.exit(EXIT_INTERRUPTED)
    except Terminated:
        notes().print("Terminated.")
        sys.exit(EXIT_TERMINATED)
    sys.exit(0)
