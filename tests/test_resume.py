"""A run that was cut short anywhere goes on, and ends as if it had never stopped."""

import errno
import json
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import MODULE, edge_eval_
from test_evaluate import CHAT, config_of, write_questions
from test_model_dir import copy_model, seal
from test_run_record import CONFIG, DATA, ENVIRONMENT, MANIFEST, OBSERVED, PREDICTION, SCORING

import edge_eval.run_record as records
from edge_eval.errors import RecordError
from edge_eval.evaluate import evaluate, evaluate_together
from edge_eval.questions import load_questions
from edge_eval.run_record import (
    Begun,
    find_unfinished,
    new_record,
    open_record,
    read_record,
    resume_record,
)
from edge_eval.schema import RunConfig, RunRecord

NEW = new_record(CONFIG, MANIFEST, DATA, ENVIRONMENT, SCORING)
PREDICTIONS = tuple(replace(PREDICTION, question_id=f"سؤال {n}", index=n) for n in range(3))


def answers(record: RunRecord) -> list[dict[str, Any]]:
    """All that is recorded of every question, but for the time it took."""
    return [asdict(replace(p, latency_s=None)) for p in record.predictions]


def go_on(path: Path, run: RunRecord = NEW) -> RunRecord:
    """Resume a record and answer what is missing."""
    with resume_record(path, run) as writer:
        for p in PREDICTIONS:
            if p.index not in writer.answered:
                writer.append(p)
        writer.finish(OBSERVED, len(PREDICTIONS))
    return read_record(path)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole record as bytes, to be cut."""
    path = tmp_path_factory.mktemp("records") / "whole.jsonl"
    go_on(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run that nothing interrupted."""
    return evaluate(config_of(tiny_model), tmp_path_factory.mktemp("runs") / "whole.jsonl")


def cut_copy(whole: RunRecord, path: Path, share: float = 0.6) -> Path:
    """The record as a process killed in mid-line leaves it."""
    content = Path(whole.path).read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


# ---- wherever it was cut


@pytest.mark.parametrize("tail", [b"", b"\0" * 50], ids=["cut", "zeros of a power loss"])
def test_a_record_cut_at_any_byte_goes_on(
    tail: bytes, begun: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records.os, "fsync", lambda _: None)  # thousands of them take a minute
    path = tmp_path / "cut.jsonl"
    expected = json.loads(begun.split(b"\n", 1)[0])
    for n_bytes in range(0, len(begun) - 1, 11):
        path.write_bytes(begun[:n_bytes] + tail)
        found = go_on(path)
        assert found.complete
        assert found.predictions == PREDICTIONS
        header = json.loads(path.read_bytes().split(b"\n", 1)[0])
        assert header | {"created": ""} == expected | {"created": ""}
        went_on = n_bytes > begun.index(b"\n")
        assert len(found.environment.get("resumed", [])) == went_on


def test_a_run_cut_anywhere_ends_as_an_uninterrupted_one(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    content = Path(whole.path).read_bytes()
    path = tmp_path / "cut.jsonl"
    for n_bytes in np.random.default_rng(0).integers(0, len(content) - 1, 10):
        path.write_bytes(content[:n_bytes])
        found = evaluate(config_of(tiny_model), path)
        assert found.complete
        assert answers(found) == answers(whole)


@pytest.mark.parametrize("settings", [{"scenario": "offline"}, {"reuse": "shared"}], ids=str)
def test_every_way_to_run_goes_on(
    settings: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_model, threads=2, **settings)
    whole = evaluate(config, tmp_path / "whole.jsonl")
    found = evaluate(config, cut_copy(whole, tmp_path / "cut.jsonl"))
    values = [
        np.array([p.letter_logits for p in r.predictions], dtype=float) for r in (whole, found)
    ]
    np.testing.assert_allclose(values[1], values[0], atol=1e-4)
    names = [[(p.question_id, p.predicted) for p in r.predictions] for r in (whole, found)]
    assert names[0] == names[1]


def test_a_run_that_lacks_only_its_end_is_ended(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    content = Path(whole.path).read_bytes().splitlines(keepends=True)
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(content[:-1]))
    found = evaluate(config_of(tiny_model), path)
    assert found.complete
    assert answers(found) == answers(whole)


def test_a_run_of_shared_beginnings_that_lacks_only_its_end_is_ended(
    tiny_model: Path, tmp_path: Path
) -> None:
    path, config = tmp_path / "r.jsonl", config_of(tiny_model, reuse="shared")
    whole = evaluate(config, path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    found = evaluate(config, path)
    assert found.complete
    assert found.predictions == whole.predictions


def test_runs_together_go_on_each_from_its_own_place(tiny_model: Path, tmp_path: Path) -> None:
    configs = [config_of(tiny_model, prompt=prompt, reuse="shared") for prompt in ("en", "ar")]
    paths = [tmp_path / f"{config.prompt}.jsonl" for config in configs]
    whole = evaluate_together(configs, paths)
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[: len(content) // 2])
    first = paths[0].read_bytes()
    found = evaluate_together(configs, paths)
    assert paths[0].read_bytes() == first  # complete, so left as it was
    for a, b in zip(whole, found, strict=True):
        assert [(p.question_id, p.predicted) for p in b.predictions] == [
            (p.question_id, p.predicted) for p in a.predictions
        ]


def test_progress_counts_what_was_answered_before(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    path = cut_copy(whole, tmp_path / "cut.jsonl")
    n_before = len(read_record(path).predictions)
    seen: list[tuple[int, int]] = []
    evaluate(config_of(tiny_model), path, lambda *step: seen.append(step))
    assert seen == [(done, 12) for done in range(n_before, 13)]


# ---- killed, interrupted, out of space


RUN = """
import sys
from pathlib import Path
from edge_eval.evaluate import evaluate
from edge_eval.schema import RunConfig
evaluate(RunConfig(model=sys.argv[1], permute=True, threads=1), Path(sys.argv[2]))
"""


def kill_and_resume(model: Path, path: Path, n_kills: int, seed: int) -> tuple[int, int]:
    """Start the same run again and again, each killed at a random moment; kills, answers lost."""
    rng = np.random.default_rng(seed)
    killed = lost = 0
    for _ in range(n_kills):
        before = read_record(path).predictions if path.exists() and path.stat().st_size else ()
        n_more = int(rng.integers(1, 12))
        with subprocess.Popen([sys.executable, "-c", RUN, str(model), str(path)]) as process:
            n_lines = path.read_bytes().count(b"\n") if path.exists() else 0
            while process.poll() is None:
                if path.exists() and path.read_bytes().count(b"\n") >= n_lines + n_more:
                    break
                time.sleep(0.001)
            time.sleep(rng.random() * 0.005)
            process.kill()
        killed += process.returncode == -signal.SIGKILL
        kept = {(p.question_id, p.rotation): p for p in read_record(path).predictions}
        assert len(kept) == len(read_record(path).predictions)
        lost += sum(kept.get((p.question_id, p.rotation)) != p for p in before)
    return killed, lost


@pytest.mark.skipif(sys.platform == "win32", reason="a signal of POSIX")
def test_a_run_killed_again_and_again_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    config = RunConfig(model=str(tiny_model), permute=True, threads=1)
    killed, lost = kill_and_resume(tiny_model, tmp_path / "r.jsonl", 8, seed=0)
    assert killed >= 4
    assert lost == 0
    found = evaluate(config, tmp_path / "r.jsonl")
    assert answers(found) == answers(evaluate(config, tmp_path / "whole.jsonl"))


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource", reason="no limits on files on this system")
    path = tmp_path / "r.jsonl"
    limit = Path(whole.path).stat().st_size // 2
    done = subprocess.run(
        [*MODULE, "run", str(tiny_model), "--limit", "12", "--threads", "1", "-o", str(path)],
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    told = [line for line in done.stderr.decode().splitlines() if line and "Note" not in line]
    assert done.returncode == 1
    assert len(told) == 1
    assert "cannot be written further: File too large" in told[0]
    assert 0 < len(read_record(path).predictions) < 12
    assert answers(evaluate(config_of(tiny_model), path)) == answers(whole)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_of_the_disk_in_mid_line_keeps_what_was_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"

    class FullDisk(records.FileIO):
        def write(self, data: Any) -> int:
            if b"\xd8\xb3\xd8\xa4\xd8\xa7\xd9\x84 1" in bytes(data):
                super().write(data[:40])
                raise OSError(number, "the disk's own words")
            return super().write(data)

    with monkeypatch.context() as patch:
        patch.setattr(records, "FileIO", FullDisk)
        with pytest.raises(RecordError, match="cannot be written further: the disk's own words"):
            go_on(path)
    assert read_record(path).predictions == PREDICTIONS[:1]
    assert go_on(path).predictions == PREDICTIONS


def test_a_write_that_takes_only_a_part_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(records.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:7])

    monkeypatch.setattr(records, "FileIO", Slow)
    assert go_on(tmp_path / "r.jsonl").predictions == PREDICTIONS


# ---- two runs on one file


def test_a_second_run_on_a_record_is_told(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    path = cut_copy(whole, tmp_path / "r.jsonl")
    there = read_record(path)
    with resume_record(path, replace(there, path="")):
        content = path.read_bytes()
        with pytest.raises(RecordError, match="being written by another run"):
            evaluate(config_of(tiny_model), path)
        done = edge_eval_("run", tiny_model, "--limit", "12", "-o", path)
        assert done.returncode == 1
        assert b"being written by another run" in done.stderr
        assert path.read_bytes() == content
        assert read_record(path).predictions == there.predictions  # reading is free
    assert answers(evaluate(config_of(tiny_model), path)) == answers(whole)


# ---- what is not the same run


def test_a_finished_record_is_never_written_to(whole: RunRecord, tiny_model: Path) -> None:
    content = Path(whole.path).read_bytes()
    with pytest.raises(RecordError, match="exists already and is complete"):
        evaluate(config_of(tiny_model), Path(whole.path))
    with pytest.raises(RecordError, match="exists already"):
        open_record(Path(whole.path), CONFIG, MANIFEST, DATA, {}, {})
    assert Path(whole.path).read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"mine\n", b"{}\n", b'{"kind":"prediction"}\n', b'{"kind":"hea\n', b"\0\0x"]
)
def test_a_file_that_is_no_record_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError):
        resume_record(path, NEW)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompt": "ar"}, "prompt (en there, ar now)"),
        ({"letters": "arabic"}, "letters (latin there, arabic now)"),
        ({"shots": 2}, "shots (0 there, 2 now)"),
        ({"limit": 11}, "limit (12 there, 11 now)"),
        ({"seed": 3}, "seed (0 there, 3 now)"),
        ({"permute": True}, "permute (False there, True now)"),
        ({"scenario": "offline"}, "scenario"),
        ({"reuse": "shared"}, "reuse"),
        ({"groups": ("Humanities",)}, "groups"),
        ({"protocol": "oall"}, "protocol (paper there, oall now)"),
    ],
    ids=str,
)
def test_another_setting_is_refused_by_its_name(
    settings: dict[str, Any], named: str, whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    path = cut_copy(whole, tmp_path / "r.jsonl")
    content = path.read_bytes()
    with pytest.raises(RecordError, match="cannot go on with it") as caught:
        evaluate(config_of(tiny_model, **settings), path)
    assert named in str(caught.value)
    assert path.read_bytes() == content


def test_another_model_is_refused_and_a_moved_one_is_not(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    moved = copy_model(tiny_model, tmp_path)
    assert answers(
        evaluate(config_of(moved), cut_copy(whole, tmp_path / "moved.jsonl"))
    ) == answers(whole)
    head = np.load(moved / "lm_head.npy")
    np.save(moved / "lm_head.npy", head * np.float32(2))
    with pytest.raises(RecordError, match="begun with another files:"):
        evaluate(config_of(seal(moved)), cut_copy(whole, tmp_path / "r.jsonl"))


def test_other_rows_and_another_order_of_them_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    questions = load_questions(RunConfig(limit=4)).test
    data = write_questions(tmp_path / "data.csv", *questions)
    config = config_of(tiny_model, data=data, limit=None)
    whole = evaluate(config, tmp_path / "whole.jsonl")
    write_questions(tmp_path / "data.csv", *questions[::-1])
    with pytest.raises(RecordError, match="another prompts:"):
        evaluate(config, cut_copy(whole, tmp_path / "r.jsonl", 0.9))
    write_questions(tmp_path / "data.csv", replace(questions[0], text="؟"), *questions[1:])
    with pytest.raises(RecordError, match="another data, prompts:"):
        evaluate(config, cut_copy(whole, tmp_path / "r.jsonl", 0.9))


def test_another_chat_template_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    config = config_of(tiny_model, chat_template=str(template))
    whole = evaluate(config, tmp_path / "whole.jsonl")
    assert answers(evaluate(config, cut_copy(whole, tmp_path / "r.jsonl"))) == answers(whole)
    template.write_text(CHAT.replace("assistant:", "model:"))
    with pytest.raises(RecordError, match="another chat_template, prompts:"):
        evaluate(config, cut_copy(whole, tmp_path / "s.jsonl"))


def test_a_question_that_stands_twice_is_not_gone_on_with(begun: bytes, tmp_path: Path) -> None:
    lines = begun.splitlines(keepends=True)
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join([*lines[:2], lines[1]]))
    with pytest.raises(RecordError, match="twice"):
        resume_record(path, NEW)


def test_another_machine_is_noted_and_both_are_recorded(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    path = cut_copy(whole, tmp_path / "r.jsonl")
    notes: list[str] = []
    found = evaluate(config_of(tiny_model, threads=2), path, on_note=notes.append)
    assert any("goes on" in note and "other threads" in note for note in notes)
    assert found.environment["threads"] == 1
    assert [e["threads"] for e in found.environment["resumed"]] == [2]


# ---- the command


def test_the_command_goes_on_and_says_so(
    whole: RunRecord, tiny_model: Path, tmp_path: Path
) -> None:
    path = cut_copy(whole, tmp_path / "r.jsonl")
    n = len(read_record(path).predictions)
    done = edge_eval_("run", tiny_model, "--limit", "12", "--threads", "1", "-o", path)
    assert done.returncode == 0
    assert f"goes on: {n} answers are there already." in " ".join(done.stderr.decode().split())
    assert answers(read_record(path)) == answers(whole)


def test_resume_without_anything_to_resume_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    done = edge_eval_("run", tiny_model, "-o", tmp_path / "r.jsonl", "--resume")
    assert done.returncode == 1
    assert b"nothing to resume" in done.stderr
    assert not (tmp_path / "r.jsonl").exists()


def test_resume_takes_the_newest_record_of_the_name(tmp_path: Path) -> None:
    from edge_eval.cli import _begun_path, _run_path

    older = _run_path(tmp_path, Path("model"), "en-latin")
    older.write_text("")
    _run_path(tmp_path, Path("model"), "ar-latin").write_text("")
    time.sleep(0.002)
    newer = _run_path(tmp_path, Path("model"), "en-latin")
    newer.write_text("")
    assert _begun_path(tmp_path, Path("model"), "en-latin") == newer


def test_what_was_answered_is_counted_and_not_held(tmp_path: Path) -> None:
    path, n = tmp_path / "r.jsonl", 2000
    with resume_record(path, NEW) as writer:
        for index in reversed(range(n)):
            writer.append(replace(PREDICTION, question_id=f"q{index}", index=index))
    peaks = []
    for read in (read_record, find_unfinished):
        tracemalloc.start()
        found = read(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert isinstance(found, Begun)
    assert found.record.predictions == ()
    assert found.answered.tolist() == [*reversed(range(n))]
    assert found.n_bytes == path.stat().st_size
    assert peaks[0] > 500 * n
    assert peaks[1] < 80 * n
    with resume_record(path, NEW) as writer:
        assert writer.answered.tolist() == [*range(n)]


def test_letters_are_held_once(begun: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(begun)
    first, *others = read_record(path).predictions
    assert all(p.letters is first.letters for p in others)


def test_a_new_place_has_nothing_to_go_on_with(tmp_path: Path) -> None:
    assert find_unfinished(tmp_path / "r.jsonl") is None
    (tmp_path / "empty").write_bytes(b"")
    assert find_unfinished(tmp_path / "empty") is None
