"""A command ends with its results on stdout, or with one line on stderr and an exit code."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_eval.console import harmless, print_json
from edge_eval.errors import EdgeEvalError

BEGIN = "from edge_eval.console import *; from edge_eval.errors import *; import time\n"


def python(body: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a function's body as a command of its own."""
    code = BEGIN + "def app():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    command = [sys.executable, "-c", code + "run_app(app)"]
    return subprocess.run(command, capture_output=True, check=False, env=os.environ | environment)


def test_a_command_that_ends_well_leaves_its_results_alone() -> None:
    done = python("results().print('سؤال'); notes().print('a note')", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "سؤال\n", b"a note\n")


@pytest.mark.parametrize("kind", [EdgeEvalError, *EdgeEvalError.__subclasses__()])
def test_every_users_error_is_one_line_on_stderr(kind: type[EdgeEvalError]) -> None:
    # Markup, a colour's name and a long path are text like any other.
    message = "[red]/data/[/b]" + "long/" * 40 + "x.csv: سؤال"
    done = python(f"raise {kind.__name__}({message!r})", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"Error: {message}\n"


def test_a_bug_keeps_its_traceback() -> None:
    done = python("1 / 0")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_closes_what_is_open_and_tells_the_exit_code(
    number: int, code: int, tmp_path: Path
) -> None:
    body = f"""
import os, signal
with open({str(tmp_path / "kept")!r}, "w") as file:
    file.write("kept")
    os.kill(os.getpid(), {int(number)})
    time.sleep(60)
"""
    done = python(body.strip())
    assert done.returncode == code
    assert (tmp_path / "kept").read_text() == "kept"
    assert done.stderr.decode().count("\n") == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(100_000): results().print('line')",
        "for _ in range(100_000): print('line')",
        "print_json(list(range(100_000)))",
    ],
    ids=["results", "print", "json"],
)
def test_a_reader_that_has_enough_is_no_error(body: str) -> None:
    code = f"{BEGIN}def app():\n    {body}\nrun_app(app)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
        assert (process.wait(60), stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "cp1256", "latin-1", "utf-8"])
def test_a_console_that_cannot_show_a_letter_does_not_fail(encoding: str) -> None:
    body = "results().print('هـ ± ✓ 好'); raise DataError('سؤال ✓')"
    done = python(body, PYTHONIOENCODING=encoding)
    assert done.returncode == 1
    assert done.stdout.decode(encoding).endswith("\n")
    assert done.stderr.decode(encoding).startswith("Error: ")
    assert b"Traceback" not in done.stderr


def test_json_is_utf_8_whatever_the_console_speaks() -> None:
    done = python("print('سؤال'); print_json({'letter': 'ه ✓'})", PYTHONIOENCODING="cp1256")
    text, _, document = done.stdout.partition(b"\n")
    assert text.decode("cp1256") == "سؤال"
    assert json.loads(document.decode("utf-8")) == {"letter": "ه ✓"}


def test_json_goes_to_a_stdout_that_only_takes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stdout", captured)
    print_json({"letter": "ه"})
    assert json.loads(captured.getvalue()) == {"letter": "ه"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_json_has_no_nan(bad: float, capsys: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"accuracy": bad})
    assert capsys.readouterr().out == ""


# ---- strangers' texts

OBEYED = "a\x1b[2J\x07\x9b31m\u202eb\u2066\r\x7f"


def test_what_a_terminal_would_obey_is_printed_as_a_mark() -> None:
    body = f"""
from rich.table import Table
table = Table({OBEYED!r})
table.add_row({OBEYED!r})
results().print(table)
results().print({OBEYED!r})
notes().print({OBEYED!r})
"""
    done = python(body.strip(), PYTHONIOENCODING="utf-8", FORCE_COLOR="1", COLUMNS="120")
    for text in (done.stdout.decode(), done.stderr.decode()):
        assert "a\ufffd[2J\ufffd" in text
        # Rich's own colours and line ends are all that is left.
        rest = re.sub("\x1b\\[[0-9;]*m", "", text)
        assert not set(rest) & set(
            OBEYED[1:].replace("[2J", "").replace("31m", "").replace("b", "")
        )


def test_a_users_error_is_one_line_whatever_its_names_hold() -> None:
    done = python(f"raise DataError('a\\nb' + {OBEYED!r})", PYTHONIOENCODING="utf-8")
    assert done.stderr.decode() == "Error: a ba\ufffd[2J\ufffd31m\ufffdb\ufffd \ufffd\n"


def test_texts_for_a_file_are_kept_to_the_byte_and_made_harmless_on_a_terminal(
    tmp_path: Path,
) -> None:
    assert python(f"write_text({OBEYED!r})").stdout.decode() == OBEYED
    pty = pytest.importorskip("pty", reason="no terminals on this system")
    first, second = pty.openpty()
    code = BEGIN + f"run_app(lambda: write_text({OBEYED!r}))"
    subprocess.run([sys.executable, "-c", code], stdout=second, check=True)
    assert os.read(first, 1000).decode() == harmless(OBEYED)
    assert "\x1b" not in harmless(OBEYED)
    assert harmless("سؤال\u200f 1\t2\n") == "سؤال\u200f 1\t2\n"


def test_too_little_memory_is_one_line() -> None:
    done = python("bytearray(1 << 60)")
    assert done.returncode == 1
    assert done.stderr.decode().startswith("Error: there is not enough memory for this.")
    assert done.stderr.count(b"\n") == 1
