"""The commands where little is as it should be: folders, consoles, networks, memory, interpreters."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import MODULE, edge_eval_
from test_evaluate import write_questions
from test_model_dir import copy_model, edit

from edge_eval.run_record import read_record
from edge_eval.schema import Question

resource = pytest.importorskip("resource", reason="no limits on this system")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and devices of Linux")


@pytest.fixture
def run(tiny_model: Path, sample_questions: tuple[Question, ...], tmp_path: Path) -> Any:
    """Runs the tiny model on a few questions, in a process with its own surroundings."""
    data = write_questions(tmp_path / "سؤال.csv", *sample_questions[:4])

    def run(
        *python: str, command: tuple[str, ...] = (), **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        record = tmp_path / "r.jsonl"
        record.unlink(missing_ok=True)
        line = [sys.executable, *python, "-m", "edge_eval", "run", tiny_model, "--data", data]
        return subprocess.run(
            [*command, *line, "-o", record], capture_output=True, check=False, **options
        )

    return run


def assert_ran(done: subprocess.CompletedProcess[bytes], tmp_path: Path) -> None:
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Warning" not in done.stderr
    assert b"micro" in done.stdout
    record = read_record(tmp_path / "r.jsonl")
    assert record.complete
    assert len(record.predictions) == 4


def test_optimised_python_runs_the_same(run: Any, tmp_path: Path) -> None:
    assert_ran(run("-O"), tmp_path)


def test_every_file_is_opened_with_an_encoding(run: Any, tmp_path: Path) -> None:
    assert_ran(run("-X", "warn_default_encoding", "-W", "error::EncodingWarning"), tmp_path)


def test_no_home_and_no_place_for_scratch_are_needed(run: Any, tmp_path: Path) -> None:
    environment = {n: v for n, v in os.environ.items() if n not in ("HOME", "USER", "LOGNAME")}
    nowhere = {
        "HOME": "/proc/nowhere",
        "HF_HOME": "/proc/nowhere",
        "XDG_CACHE_HOME": "/proc/nowhere",
    }
    assert_ran(run(env=environment), tmp_path)
    assert_ran(run(env=environment | nowhere | {"TMPDIR": "/proc/nowhere"}), tmp_path)


@pytest.mark.parametrize("encoding", ["cp1256", "cp1252", "ascii"])
def test_an_old_console_shows_what_it_can(encoding: str, run: Any, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = run(env=environment)
    assert_ran(done, tmp_path)
    assert done.stdout.decode(encoding)


@pytest.mark.parametrize("columns", [40, 200])
def test_a_terminal_of_any_width_gets_every_figure(columns: int, run: Any, tmp_path: Path) -> None:
    done = run(env=os.environ | {"COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"})
    assert_ran(done, tmp_path)
    text = done.stdout.decode()
    for word in ("micro", "macro", "interval", "peak", "throughput", "threads"):
        assert word in text


def test_one_core_is_enough(run: Any, tmp_path: Path) -> None:
    assert_ran(run(command=("taskset", "-c", "0")), tmp_path)
    assert read_record(tmp_path / "r.jsonl").environment["threads"] == 1


def limited(kind: int, megabytes: int) -> Any:
    return lambda: resource.setrlimit(kind, (megabytes << 20, megabytes << 20))


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_too_little_memory_is_told_before_it_is_taken(
    limit: str, tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_model, tmp_path)
    with (model / "model.onnx_data").open("r+b") as file:
        file.truncate(600 << 20)  # nothing but a size: no byte of it is on disk
    files = json.loads((model / "manifest.json").read_text(encoding="utf-8"))["files"]
    files["model.onnx_data"]["size_bytes"] = 600 << 20
    edit(model, files=files)
    done = subprocess.run(
        [*MODULE, "run", model, "--no-verify-hashes", "-o", tmp_path / "r.jsonl"],
        capture_output=True,
        check=False,
        preexec_fn=limited(getattr(resource, limit), 512),
    )
    assert done.returncode == 1
    told = done.stderr.decode()
    assert "MB of memory at least, and this process may have 537 MB" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "r.jsonl").exists()


def test_a_proxy_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    environment = {
        "HTTPS_PROXY": "http://127.0.0.1:1",
        "HTTP_PROXY": "http://127.0.0.1:1",
        "HF_HOME": str(tmp_path),
        "NO_PROXY": "",
    }
    done = edge_eval_("prompts", "--data", "hub", "--limit", "1", **environment)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"the Hub is not reachable (offline, or a proxy?)" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_full_disk_for_the_results_is_no_traceback(
    tiny_model: Path, sample_questions: tuple[Question, ...], tmp_path: Path
) -> None:
    data = write_questions(tmp_path / "d.csv", *sample_questions[:2])
    for command in (
        ["prompts", "--data", data],
        ["prompts", "--data", data, "--json"],
        ["version"],
    ):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [*MODULE, *command], stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr
        assert b"No space left on device" in done.stderr


def test_a_place_for_the_record_that_is_no_place_is_one_line(tiny_model: Path) -> None:
    for place in ("/proc/r.jsonl", "/dev/full/r.jsonl", "/dev/full"):
        done = edge_eval_("run", tiny_model, "--limit", "1", "-o", place)
        assert done.returncode == 1
        assert done.stderr.count(b"\n") == 1
