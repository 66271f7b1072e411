"""What a run writes is read back, wherever it was cut short; anything else is named by its line."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edge_eval.run_record as records
from edge_eval.errors import RecordError
from edge_eval.questions import LABELS
from edge_eval.run_record import (
    MAX_LABEL,
    MAX_LINE_BYTES,
    find_unfinished,
    open_record,
    read_record,
)
from edge_eval.schema import (
    DataFingerprint,
    ExportManifest,
    Prediction,
    RunConfig,
    RunRecord,
    Status,
)

CONFIG = RunConfig(model="نموذج", tasks=("Law (Professional)",), limit=3, seed=7)
DATA = DataFingerprint("file.csv", "file", None, "ab" * 32, n_rows=9, n_refused=1, n_selected=3)
MANIFEST = ExportManifest(
    schema_version=1,
    name="tiny",
    source="someone/tiny",
    revision=None,
    architecture="llama",
    precision="fp32",
    graph="fused",
    n_layers=2,
    hidden_size=64,
    vocab_size=600,
    max_length=1024,
    sliding_window=None,
    tied_embedding=True,
    embedding_scale=1.0,
    head_bias=False,
    head_scale=1.0,
    head_softcap=30.0,
    files={"model.onnx": {"size_bytes": 3, "sha256": "00"}},
    tools={"torch": "2"},
    parity={"n_prompts": 8},
    created="2026-11-01T00:00:00+00:00",
)
PREDICTION = Prediction(
    question_id="سؤال ١",
    group="Humanities",
    subject="Law",
    level="Prof",
    country="",
    has_context=False,
    negated=True,
    n_characters=12,
    letters=("أ", "ب"),
    answer=1,
    predicted=0,
    tied=False,
    letter_logits=(0.1, -1.5, None, 3.25, 1e-7, 1.0, 2.0, 3.0, 4.0, 5.0),
    n_tokens=20,
    latency_s=0.0123,
    status=Status.SCORED,
)
PREDICTIONS = (
    PREDICTION,
    replace(
        PREDICTION, question_id='"{}\\', predicted=None, status=Status.INVALID, index=1, n_shots=3
    ),
    replace(
        PREDICTION,
        predicted=None,
        letter_logits=(None,) * 10,
        latency_s=None,
        status=Status.TOO_LONG,
        index=2,
        rotation=1,
    ),
)
SCORING = {"letters": ["A"], "letter_ids": [[34]], "normalized": False}
ENVIRONMENT = {"cpu_model": "a laptop", "threads": 2}
OBSERVED = {"load_s": 0.5, "peak_memory_bytes": None}


def write(
    path: Path, predictions: tuple[Prediction, ...] = PREDICTIONS, *, end: bool = True
) -> Path:
    with open_record(path, CONFIG, MANIFEST, DATA, ENVIRONMENT, SCORING) as record:
        for prediction in predictions:
            record.append(prediction)
        if end:
            record.finish(OBSERVED, len(predictions))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("records") / "whole.jsonl")


def damaged(whole: Path, tmp_path: Path, number: int, line: bytes) -> Path:
    """A copy of a record with one line (the first is 1) replaced."""
    lines = whole.read_bytes().split(b"\n")
    lines[number - 1] = line
    (tmp_path / "damaged.jsonl").write_bytes(b"\n".join(lines))
    return tmp_path / "damaged.jsonl"


def changed(whole: Path, tmp_path: Path, number: int, **changes: Any) -> Path:
    """A copy of a record with fields of one line's object replaced."""
    entry = json.loads(whole.read_bytes().split(b"\n")[number - 1])
    return damaged(whole, tmp_path, number, json.dumps(entry | changes).encode())


# ---- whole records


def test_a_record_is_read_as_it_was_written(whole: Path) -> None:
    found = read_record(whole)
    expected = RunRecord(
        CONFIG, MANIFEST, DATA, SCORING, ENVIRONMENT, OBSERVED, PREDICTIONS, True, found.created
    )
    assert replace(found, path="") == expected
    assert found.path == str(whole)


def test_every_line_is_strict_json_in_utf_8(whole: Path) -> None:
    text = whole.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert "\r" not in text
    assert "سؤال" in text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    kinds = [json.loads(x, parse_constant=refuse)["kind"] for x in text.splitlines()]
    assert kinds == ["header", "prediction", "prediction", "prediction", "end"]


@given(
    st.lists(
        st.builds(
            replace,
            st.just(PREDICTION),
            question_id=st.text(),
            country=st.text(max_size=3).filter(str.isprintable),
            letter_logits=st.tuples(
                *[st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32)] * 10
            ),
            predicted=st.none() | st.integers(0, 1),
            latency_s=st.none() | st.floats(0, 1e3),
            status=st.sampled_from([Status.INVALID, Status.TOO_LONG]),
        )
        | st.builds(
            replace,
            st.just(PREDICTION),
            letter_logits=st.tuples(
                *[st.floats(allow_nan=False, allow_infinity=False, width=32)] * 10
            ),
            predicted=st.integers(0, 1),
        ),
        max_size=3,
    )
)
@settings(max_examples=50)
def test_any_prediction_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, predictions: list[Prediction]
) -> None:
    path = tmp_path_factory.mktemp("any") / "record.jsonl"
    assert read_record(write(path, tuple(predictions))).predictions == tuple(predictions)


def test_predictions_are_read_in_the_datas_order(tmp_path: Path) -> None:
    path = write(tmp_path / "record.jsonl", PREDICTIONS[::-1])
    assert read_record(path).predictions == PREDICTIONS


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path, bad: float) -> None:
    path = tmp_path / "record.jsonl"
    with open_record(path, CONFIG, MANIFEST, DATA, {}, {}) as record:
        record.append(PREDICTION)
        with pytest.raises(ValueError, match="not JSON compliant"):
            record.append(replace(PREDICTION, letter_logits=(bad,) * 10))
    assert read_record(path).predictions == (PREDICTION,)


def test_a_line_is_on_disk_as_soon_as_it_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with open_record(path, CONFIG, MANIFEST, DATA, {}, {}) as record:
        for n in range(1, 4):
            record.append(replace(PREDICTION, index=n))
            assert len(read_record(path).predictions) == n


# ---- interrupted records


def test_a_record_without_an_end_is_incomplete_and_kept(tmp_path: Path) -> None:
    found = read_record(write(tmp_path / "record.jsonl", end=False))
    assert not found.complete
    assert found.predictions == PREDICTIONS
    assert found.observed == {}


def test_a_record_cut_within_its_header_is_none(whole: Path, tmp_path: Path) -> None:
    header = whole.read_bytes().partition(b"\n")[0]
    path = tmp_path / "cut.jsonl"
    for n_bytes in {*range(0, len(header), 50), len(header)}:
        path.write_bytes(header[:n_bytes])
        with pytest.raises(RecordError, match="no whole header"):
            read_record(path)


def test_a_record_cut_at_any_byte_keeps_every_whole_line(tmp_path: Path) -> None:
    path = write(tmp_path / "record.jsonl", PREDICTIONS[:1])
    content = path.read_bytes()
    for n_bytes in range(content.index(b"\n") + 1, len(content)):
        path.write_bytes(content[:n_bytes])
        found = read_record(path)
        assert found.predictions == PREDICTIONS[: content[:n_bytes].count(b"\n") - 1]
        assert not found.complete


def test_bytes_behind_the_end_marker_are_an_error(whole: Path, tmp_path: Path) -> None:
    for rest in (b'{"kind"', b"\n", b'{"kind":"end"}\n', whole.read_bytes()):
        path = tmp_path / "longer.jsonl"
        path.write_bytes(whole.read_bytes() + rest)
        with pytest.raises(RecordError, match=r"longer\.jsonl"):
            read_record(path)


# ---- damaged records


def test_what_only_pretends_to_be_a_record_does_not_end_in_memory(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 5000)
    for content in (b'{"kind":"header"' + b" " * 6000, whole.read_bytes() + b"\0" * 6000):
        path = tmp_path / "huge.jsonl"
        path.write_bytes(content)
        with pytest.raises(RecordError, match="longer than 5,000 bytes"):
            read_record(path)


def test_what_repeats_in_a_record_is_held_once(whole: Path) -> None:
    a, b, *_ = read_record(whole).predictions
    assert a.group is b.group
    assert a.subject is b.subject


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"garbage",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"header"',
        b"{}",
        b'{"kind":"prediction"}',
        b'{"kind":"unknown"}',
        b'{"kind":"prediction","value":NaN}',
        b'{"kind":"prediction","value":-Infinity}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda line: line[:30].decode("latin-1"),
)
def test_a_line_of_garbage_is_named_by_its_number(
    number: int, line: bytes, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=rf"damaged\.jsonl, line {number}: not a line") as caught:
        read_record(damaged(whole, tmp_path, number, line))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", "guessed"),
        ("letters", None),
        ("letter_logits", 1.0),
        ("letter_logits", ["1.0"] * 10),
        ("letter_logits", [1.0] * 9),
        ("predicted", "A"),
        ("predicted", 2),
        ("answer", None),
        ("answer", 1.5),
        ("n_tokens", "20"),
        ("latency_s", "fast"),
        ("index", None),
        ("level", "Nursery"),
        ("group", "a\x01b"),
        ("group", "a\ufffeb"),
        ("subject", "\x1b]0;x\x07"),
        ("subject", "S" * (MAX_LABEL + 1)),
        ("subject", "g" * 1_000_000),
        ("country", "a\u202eb"),
        ("country", "\ud800"),
        ("unheard_of", 1),
        ("unheard\nof", 1),
        ("letters", ["B", "C"]),
        ("letters", ["A"]),
        ("letter_logits", [1e39] * 10),
        ("latency_s", -0.001),
        ("latency_s", 1e300),
        ("n_tokens", -1),
        ("n_characters", 1 << 63),
        ("predicted", None),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_field_that_cannot_be_is_named_by_its_line(
    field: str, value: object, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=r"line 2") as caught:
        read_record(changed(whole, tmp_path, 2, **{field: value}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("column", LABELS)
def test_every_label_that_a_question_may_have_is_read_back(column: str, tmp_path: Path) -> None:
    labels = [replace(PREDICTION, **{column.lower(): label}) for label in LABELS[column]]
    written = tuple(replace(p, index=index) for index, p in enumerate(labels))
    assert read_record(write(tmp_path / "record.jsonl", written)).predictions == written
    assert read_record(changed(tmp_path / "record.jsonl", tmp_path, 2, subject="S" * MAX_LABEL))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("config", None),
        ("config", []),
        ("config", {"unheard_of": 1}),
        ("manifest", None),
        ("manifest", {}),
        ("data", []),
        ("scoring", None),
        ("scoring", {"letters": "ABCDE"}),
        ("scoring", {"letters": [1]}),
        ("environment", []),
        ("environment", {"threads": "two"}),
        ("environment", {"instruction_sets": "avx"}),
        ("environment", {"cpu_model": ["a laptop"]}),
        ("created", None),
    ],
    ids=str,
)
def test_a_header_that_cannot_be_is_named_as_line_1(
    field: str, value: object, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=r"line 1"):
        read_record(changed(whole, tmp_path, 1, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_predictions", 2),
        ("n_predictions", "3"),
        ("observed", []),
        ("observed", {"load_s": "fast"}),
        ("observed", {"peak_memory_bytes": [1]}),
        ("observed", {"wall_s": -1}),
    ],
    ids=str,
)
def test_an_end_marker_that_does_not_fit_is_named_by_its_line(
    field: str, value: object, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=r"line 5"):
        read_record(changed(whole, tmp_path, 5, **{field: value}))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_named(version: object, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"schema version .*; this edge-eval reads 1"):
        read_record(changed(whole, tmp_path, 1, schema_version=version))


def test_a_number_too_large_for_a_float_is_no_value(whole: Path, tmp_path: Path) -> None:
    line = whole.read_bytes().split(b"\n")[1].replace(b"3.25", b"1e999")
    with pytest.raises(RecordError, match="line 2"):
        read_record(damaged(whole, tmp_path, 2, line))


@pytest.mark.parametrize("content", [b"", b"\n", b"not a record\n", b"PK\x03\x04\x00\n\x00"])
def test_a_file_that_is_no_record_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"other\.jsonl"):
        read_record(path)


def test_a_place_without_a_record_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(RecordError, match="cannot be read"):
            read_record(path)


# ---- places to write


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(RecordError, match="exists already"):
        open_record(tmp_path / "mine", CONFIG, MANIFEST, DATA, {}, {})
    assert (tmp_path / "mine").read_text() == "kept"


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    assert read_record(write(tmp_path / "a" / "b" / "record.jsonl")).complete


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot be written.*-o"):
        open_record(tmp_path / "file" / "record.jsonl", CONFIG, MANIFEST, DATA, {}, {})


def test_a_name_longer_than_the_system_allows_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be written"):
        open_record(tmp_path / ("a" * 300), CONFIG, MANIFEST, DATA, {}, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RecordError, match="cannot be written"):
        open_record(tmp_path / "record.jsonl", CONFIG, MANIFEST, DATA, {}, {})


def test_a_full_disk_is_told_and_what_was_written_is_kept(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="no limits on files on this system")
    path = tmp_path / "record.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        with open_record(path, CONFIG, MANIFEST, DATA, {}, {}) as record:
            record.append(PREDICTION)
            # As full a disk as a test can make: no file may grow by more than 100 bytes.
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
            record.append(PREDICTION)

    try:
        with pytest.raises(RecordError, match="cannot be written further"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_record(path).predictions == (PREDICTION,)


def test_a_model_folder_whose_name_is_not_utf_8_is_recorded(tmp_path: Path) -> None:
    # Such a name reaches Python with half surrogates, which UTF-8 cannot hold.
    config = replace(CONFIG, model=os.fsdecode(b"mod\xe8le"))
    path = tmp_path / "record.jsonl"
    with open_record(path, config, MANIFEST, DATA, {}, {}) as record:
        record.append(PREDICTION)
    assert read_record(path).predictions == (PREDICTION,)


def test_a_first_line_longer_than_any_header_is_no_torn_header(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"kind":"header","x":"'.ljust(MAX_LINE_BYTES + 2, b"x"))
    for read in (read_record, find_unfinished):
        with pytest.raises(RecordError, match=r"line 1: .*longer than 16,777,216 bytes"):
            read(path)
