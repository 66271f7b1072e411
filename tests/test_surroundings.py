"""The commands where little is as it should be: folders, consoles, networks, memory, interpreters."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli import MODULE, edge_eval_
from test_evaluate import write_questions
from test_model_dir import copy_model, edit

import edge_eval
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
    done = run("-X", "warn_default_encoding", "-W", "always::EncodingWarning")
    assert done.returncode == 0
    lines = done.stderr.decode().splitlines()
    package = str(Path(edge_eval.__file__).parent)  # what libraries do is their matter
    assert [line for line in lines if "EncodingWarning" in line and package in line] == []


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


@pytest.fixture
def bound() -> tuple[str, ...]:
    """What a command begins with so that a file's mode binds it, though root may run the tests."""
    if os.geteuid():
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and cannot give that up here")
    return ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


@pytest.fixture
def read_only(tmp_path: Path, tiny_model: Path) -> Iterator[Path]:
    """A folder with a model, a home and a file in it, where nothing may be written."""
    folder = tmp_path / "read-only"
    shutil.copytree(tiny_model, folder / "model")
    (folder / "home").mkdir()
    (folder / "begun.jsonl").touch()
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def test_a_model_a_home_and_a_scratch_that_are_read_only_are_enough(
    read_only: Path, bound: tuple[str, ...], tmp_path: Path
) -> None:
    home = str(read_only / "home")
    environment = os.environ | dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR"), home)
    record = tmp_path / "r.jsonl"
    model = read_only / "model"
    done = subprocess.run(
        [*bound, *MODULE, "run", model, "--limit", "4", "-o", record],
        capture_output=True,
        check=False,
        env=environment,
    )
    assert_ran(done, tmp_path)


def test_what_may_not_be_read_or_written_is_one_line(
    read_only: Path, bound: tuple[str, ...], tmp_path: Path
) -> None:
    def told(*command: str | Path) -> str:
        done = subprocess.run([*bound, *MODULE, *command], capture_output=True, check=False)
        assert done.returncode == 1
        errors = [line for line in done.stderr.decode().splitlines() if line.startswith("Error: ")]
        assert b"Traceback" not in done.stderr
        assert len(errors) == 1
        return errors[0]

    model = read_only / "model"
    run = ("run", model, "--limit", "2", "-o")
    for place in ("r.jsonl", "new/r.jsonl", "begun.jsonl"):
        said = f"{read_only / place} cannot be written: Permission denied"
        assert said in told(*run, read_only / place)
    for name in ("tokenizer.json", "lm_head.npy", "manifest.json"):
        (model / name).chmod(0o000)
        assert str(model / name) in told(*run, tmp_path / "r.jsonl")
        assert not (tmp_path / "r.jsonl").exists()
        (model / name).chmod(0o555)


def test_a_clock_that_jumps_backwards_changes_no_latency(tiny_model: Path, tmp_path: Path) -> None:
    script = """
import itertools, runpy, sys, time
jumps, real = itertools.count(), time.time
time.time = lambda: real() - 3.2e7 * next(jumps)
time.time_ns = lambda: int(time.time() * 1e9)
sys.argv[0] = "edge_eval"
runpy.run_module("edge_eval", run_name="__main__")
"""
    (tmp_path / "clock.py").write_text(script, encoding="utf-8")
    record = tmp_path / "r.jsonl"
    done = subprocess.run(
        [sys.executable, tmp_path / "clock.py", "run", tiny_model, "--limit", "4", "-o", record],
        capture_output=True,
        check=False,
    )
    assert_ran(done, tmp_path)
    found = read_record(record)
    assert all(0 < (p.latency_s or 0) < 60 for p in found.predictions)
    assert 0 < found.observed["wall_s"] < 60


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
