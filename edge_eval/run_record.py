"""RunRecord <-> JSON Lines: one header, one line a question as it is answered, one end marker.

Schema history, newest first:
    1  2026-11  the first

Strict JSON (no NaN), UTF-8. A run that was killed keeps every line but the one in flight; the run
that goes on with it cuts that one off and writes a line of kind "resumed" with its own environment.
What must be the same in both stands in differences().
"""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from io import BufferedReader, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast, get_args, get_origin

import numpy as np

from edge_eval.errors import RecordError
from edge_eval.letters import ARABIC, LATIN
from edge_eval.schema import (
    LEVEL_TITLES,
    DataFingerprint,
    ExportManifest,
    Int64Array,
    Prediction,
    RunConfig,
    RunRecord,
    Status,
)

SCHEMA_VERSION = 1

# A loss of power takes with it what the system had not written yet: at most so much time's.
SYNC_S = 10.0

# Windows locks bytes, not files, and hides them from readers: one that no record reaches.
_LOCKED_BYTE = 1 << 40

# Far above any line: what only pretends to be a record does not end in the machine's memory.
MAX_LINE_BYTES = 1 << 24
MAX_LABEL = 200  # characters of a group, subject, level or country; ArabicMMLU's have up to 25

_BEGINNING = b'{"kind":"header"'

T = TypeVar("T")


def to_json(value: object) -> str:
    """One line of strict JSON."""
    options: Any = {"allow_nan": False, "separators": (",", ":")}
    text = json.dumps(value, ensure_ascii=False, **options)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, as in a file's name that is not UTF-8
        return json.dumps(value, **options)
    return text


def _header(record: RunRecord) -> dict[str, Any]:
    return {
        "kind": "header",
        "schema_version": SCHEMA_VERSION,
        "created": record.created,
        "config": dataclasses.asdict(record.config),
        "manifest": dataclasses.asdict(record.manifest),
        "data": dataclasses.asdict(record.data),
        "scoring": dict(record.scoring),
        "environment": dict(record.environment),
    }


class RecordWriter:
    """Appends a run to its file, line by line, each with the system before the next question.

    The file is locked as long as it is open: no second run can write to it.
    """

    def __init__(self, path: Path, record: RunRecord, *, resume: bool = False) -> None:
        self.path = path
        self._file = _open(path, "ab+")
        try:
            found = _read_unfinished(path, self._file)
            if not resume and (found is not None or _size(self._file)):
                raise _exists(path)
            self._begin(record, found)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, record: RunRecord, found: "Begun | None") -> None:
        self.answered: Int64Array = np.empty(0, dtype=np.int64)  # indices of prompts, ascending
        self._complete = False
        self._synced = time.monotonic()
        if found is None:
            self._file.truncate(0)  # what was cut short before its header was whole
            self._write(_header(record))
            return
        check_same_run(self.path, found.record, record)
        self.answered = np.unique(found.answered)
        if len(self.answered) < len(found.answered):
            raise RecordError(f"{self.path} holds a question twice: it cannot be gone on with.")
        self._complete = found.record.complete
        if not self._complete:
            self._file.truncate(found.n_bytes)
            environment = dict(record.environment)
            self._write({"kind": "resumed", "created": record.created, "environment": environment})

    def append(self, prediction: Prediction) -> None:
        """Write one prediction."""
        self._write({"kind": "prediction", **dataclasses.asdict(prediction)})
        if time.monotonic() - self._synced > SYNC_S:
            self._sync()

    def finish(self, observed: Mapping[str, Any], n_predictions: int) -> None:
        """Write the end marker: the record is complete."""
        if not self._complete:
            end = {"kind": "end", "n_predictions": n_predictions, "observed": dict(observed)}
            self._write(end)
            self._sync()

    def _write(self, value: dict[str, Any]) -> None:
        rest = memoryview((to_json(value) + "\n").encode("utf-8"))
        with self._errors_told():
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]

    def _sync(self) -> None:
        with self._errors_told():
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be written further: {error.strerror}. What was answered "
                "before is kept in it; the same command goes on with it."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def open_record(
    path: Path,
    config: RunConfig,
    manifest: ExportManifest,
    data: DataFingerprint,
    environment: Mapping[str, Any],
    scoring_facts: Mapping[str, Any],
) -> RecordWriter:
    """A new record with its header written.

    Errors: RecordError when the file exists or cannot be written.
    """
    return RecordWriter(path, new_record(config, manifest, data, environment, scoring_facts))


def resume_record(path: Path, record: RunRecord) -> RecordWriter:
    """The record of a run as new_record() describes it: a new one, or one begun before.

    Errors: RecordError when another run holds the file, when it is no record, or when what was
    begun is not the same run.
    """
    return RecordWriter(path, record, resume=True)


def new_record(
    config: RunConfig,
    manifest: ExportManifest,
    data: DataFingerprint,
    environment: Mapping[str, Any],
    scoring_facts: Mapping[str, Any],
) -> RunRecord:
    """A run that has answered nothing yet."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    facts = json.loads(to_json(dict(scoring_facts)))  # as it will be read: lists, not tuples
    return RunRecord(config, manifest, data, facts, environment, {}, (), False, created)


def find_unfinished(path: Path) -> "Begun | None":
    """What a run that goes on must know of the record that a run at ``path`` would go on with, complete or not; None for a new one.

    Errors: RecordError when another run holds the file, or when it is no record.
    """
    if not path.exists():
        return None
    with _open(path, "rb") as file:
        return _read_unfinished(path, file)


# What two halves of one run may differ in: names of things whose content is compared, and
# settings that change no answer.
_NAMES_AND_TIMES = {
    "config": {"model", "file", "data", "threads", "warmup", "concurrency", "timeout_s"},
    "manifest": {"name", "source", "revision", "tools", "parity", "created", "quantization"}
    | {"tokenizer"},
    "data": {"source", "kind", "revision", "n_rows", "n_refused", "n_selected"},
    "scoring": set[str](),
}


def differences(there: RunRecord, here: RunRecord) -> list[str]:
    """Everything in which two runs differ that can change an answer, in words."""
    a, b = _header(there), _header(here)
    found = set()
    for section, left_out in _NAMES_AND_TIMES.items():
        for name in (a[section] | b[section]).keys() - left_out:
            old, new = a[section].get(name), b[section].get(name)
            what = "data" if section == "data" else name.removesuffix("_sha256")
            if old != new:
                short = max(len(str(old)), len(str(new))) <= 30
                found.add(f"{what} ({old} there, {new} now)" if short else what)
    return sorted(found)


def other_environment(there: RunRecord, here: RunRecord) -> list[str]:
    """In what the machine of a run that goes on is another: nothing that forbids it."""
    names = ("architecture", "cpu_model", "instruction_sets", "threads", "streams", "versions")
    return [n for n in names if there.environment.get(n) != here.environment.get(n)]


def check_same_run(path: Path, there: RunRecord, here: RunRecord) -> None:
    """Raise RecordError when a run cannot go on with the record found at ``path``."""
    if unlike := differences(there, here):
        raise RecordError(
            f"{path} was begun with another {', '.join(unlike)}: a run cannot go on with it. Give "
            "the settings it was begun with, or name another record with -o."
        )


def _exists(path: Path) -> RecordError:
    return RecordError(f"{path} exists already: name another with -o, or remove it.")


def _open(path: Path, mode: str) -> FileIO:
    """Open a record for this process alone.

    Errors: RecordError when it cannot be opened, or when another run holds it.
    """
    try:
        if "a" in mode:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise _exists(path)
        file = FileIO(path, mode)
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written: {error.strerror}. Name a place you can write with -o."
        ) from error
    try:
        _lock(file)
    except OSError as error:
        # Some network file systems have no locks; a run on them goes without.
        if error.errno in {errno.EACCES, errno.EAGAIN, errno.EDEADLK}:
            file.close()
            raise RecordError(
                f"{path} is being written by another run: wait for it, or name another with -o."
            ) from error
    return file


def _lock(file: FileIO) -> None:
    """Lock a file until it is closed or this process dies, however it dies."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(_LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _size(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A record found on disk, by what a run that goes on with it must know."""

    record: RunRecord  # without its predictions
    answered: Int64Array  # the index of each prediction, in the file's order
    n_bytes: int  # up to the end of its last whole line


def _read_unfinished(path: Path, file: FileIO) -> Begun | None:
    """The record in a file; None when it is empty or was cut short within its header."""
    file.seek(0)
    start = file.read(len(_BEGINNING)).rstrip(b"\0")
    if not (start and _BEGINNING.startswith(start)):
        if not start:
            return None
        raise _exists(path)
    file.seek(0)
    lines = BufferedReader(file)
    answered = array("q")
    try:
        if not _has_header(lines):
            return None
        record, n_bytes = _parse(path, lines, lambda p: answered.append(p.index))
        return Begun(record, np.array(answered, dtype=np.int64), n_bytes)
    finally:
        lines.detach()  # the file stays open, and locked


def _has_header(lines: BinaryIO) -> bool:
    """Whether the first line is whole, or longer than any; it is read and put back."""
    line = lines.readline(MAX_LINE_BYTES + 1)
    lines.seek(0)
    return line.endswith(b"\n") or len(line) > MAX_LINE_BYTES


def read_record(path: Path) -> RunRecord:
    """A run record; a torn last line is left out, anything else unreadable is an error.

    Errors: RecordError with the line's number.
    """
    predictions: list[Prediction] = []
    try:
        with path.open("rb") as file:
            record, _ = _parse(path, file, predictions.append)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error
    # Streams answer in their own order; the data's order is the same in every scenario.
    predictions.sort(key=lambda p: p.index)
    return dataclasses.replace(record, predictions=tuple(predictions))


def _parse(path: Path, file: BinaryIO, take: Callable[[Prediction], None]) -> tuple[RunRecord, int]:
    """The record in a file without its predictions, and its size up to its last whole line.

    take: is given each prediction. Of the lines only the last may lack its end.
    """
    record: RunRecord | None = None
    n_predictions = 0
    resumed: list[dict[str, Any]] = []
    observed: dict[str, Any] | None = None
    n_bytes, torn = 0, b""
    lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if (
            not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES
        ):  # cut short, or the zeros of a loss of power
            torn = line
            break
        n_bytes += len(line)
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"longer than {MAX_LINE_BYTES:,} bytes")
            entry = json.loads(
                line.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite
            )
            kind = entry["kind"]
            if kind == "header" and number == 1:
                _check_version(path, entry)
                record = _from_header(entry)
            elif kind == "prediction" and record is not None and observed is None:
                take(_prediction(entry))
                n_predictions += 1
            elif kind == "resumed" and record is not None and observed is None:
                environment = _facts(entry["environment"], ENVIRONMENT)
                resumed.append(environment | {"created": entry["created"]})
            elif kind == "end" and record is not None and observed is None:
                observed = _facts(entry["observed"], OBSERVED)
                if entry["n_predictions"] != n_predictions:
                    raise ValueError(f"the end marker counts {entry['n_predictions']} questions")
            else:
                raise ValueError(f"unexpected {kind!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            # What stands in the file may be of any length, and hold line ends.
            reason = " ".join(str(error).split())[:200]
            raise RecordError(
                f"{path}, line {number}: not a line of a run record ({reason})."
            ) from error
    if record is None:
        raise RecordError(f"{path} is empty or has no whole header: not a run record.")
    if torn.rstrip(b"\0") and observed is not None:
        raise RecordError(f"{path} goes on behind its end marker: two runs wrote to one file.")
    whole = dataclasses.replace(
        record,
        environment={**record.environment, **({"resumed": resumed} if resumed else {})},
        observed=observed or {},
        complete=observed is not None,
        path=str(path),
    )
    return whole, n_bytes


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large")
    return value


def _check_version(path: Path, header: dict[str, Any]) -> None:
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{path} is a run record of schema version {str(version)[:20]}; this edge-eval reads "
            f"{SCHEMA_VERSION}."
        )


def _from_header(entry: dict[str, Any]) -> RunRecord:
    if not isinstance(entry["created"], str):
        raise TypeError("created is no text")
    return RunRecord(
        config=_build(RunConfig, _mapping(entry["config"])),
        manifest=_build(ExportManifest, _mapping(entry["manifest"])),
        data=_build(DataFingerprint, _mapping(entry["data"])),
        scoring=_facts(entry["scoring"], SCORING),
        environment=_facts(entry["environment"], ENVIRONMENT),
        observed={},
        predictions=(),
        complete=False,
        created=entry["created"],
    )


def _prediction(entry: dict[str, Any]) -> Prediction:
    fields = {name: value for name, value in entry.items() if name != "kind"}
    for name in _REPEATED:  # held once, not once a question
        label = fields.get(name)
        if isinstance(label, str):
            # Strangers' texts, which reports draw: questions.py lets only ArabicMMLU's through.
            if len(label) > MAX_LABEL or not label.isprintable():
                raise ValueError(f"{name} is no label: {label[:40]!r}")
            fields[name] = sys.intern(label)
    if isinstance(fields.get("letters"), list):
        fields["letters"] = _held_once(*fields["letters"])
    found = _build(Prediction, fields | {"status": Status(fields["status"])})
    n_options = len(found.letters)
    if len(found.letter_logits) != 10:
        raise ValueError(f"{len(found.letter_logits)} logits")
    if not 2 <= n_options <= 5 or found.letters[0] not in (LATIN[0], ARABIC[0]):
        raise ValueError(f"letters {found.letters}")
    # They come from float32; larger ones would overflow in what is computed of them.
    if any(abs(value or 0) > _FLOAT32_MAX for value in found.letter_logits):
        raise ValueError(f"logits {found.letter_logits}")
    counts = (found.n_tokens, found.n_characters, found.n_shots, found.rotation, found.index)
    if min(counts) < 0 or max(counts) >= 1 << 31:
        raise ValueError("a count is below 0 or beyond all use")
    if not 0 <= (found.latency_s or 0) <= _LATENCY_MAX_S:
        raise ValueError(f"latency_s {found.latency_s}")
    if found.status is Status.SCORED and found.predicted is None:
        raise ValueError("scored, without a prediction")
    if found.level not in LEVEL_TITLES:
        raise ValueError(f"level {found.level!r}")
    if not all(0 <= n < n_options for n in (found.answer, found.predicted or 0)):
        raise ValueError(f"answer {found.answer}, predicted {found.predicted} of {n_options}")
    return found


@functools.lru_cache(maxsize=64)
def _held_once(*letters: str) -> tuple[str, ...]:
    return letters


def _facts(value: object, kinds: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """An object whose names are open, the values of those that others read checked."""
    found = _mapping(value)
    for name, is_right in kinds.items():
        if name in found and not is_right(found[name]):
            raise TypeError(f"{name} is {found[name]!r}")
    return found


def _is_amount(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and 0 <= cast("float", value) < _AMOUNT_MAX)


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_texts(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


_REPEATED = ("group", "subject", "level", "country")
_FLOAT32_MAX = 3.5e38
_LATENCY_MAX_S = 1e9
_AMOUNT_MAX = 1e18

# What tables, comparisons and reports read of the parts of a record that are open to new names.
SCORING = {"letters": _is_texts, "shots_sha256": _is_text, "chat_template_sha256": _is_text}
ENVIRONMENT = {
    **dict.fromkeys(("cpu_model", "architecture", "os"), _is_text),
    **dict.fromkeys(("threads", "streams"), _is_amount),
    "instruction_sets": _is_texts,
}
OBSERVED = {
    **dict.fromkeys(("wall_s", "n_prompts_together", "load_s", "first_call_s"), _is_amount),
    **dict.fromkeys(("disk_bytes", "peak_memory_bytes"), _is_amount),
    **dict.fromkeys(("rss_anon_bytes", "rss_file_bytes"), _is_amount),
}


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


def _build(kind: type[T], fields: dict[str, Any]) -> T:
    """A type of schema.py from its JSON object, the type of every field checked."""
    values = dict(fields)
    known = _FIELD_TYPES[kind]
    for name, value in fields.items():
        is_tuple, types = known.get(name, (False, (object,)))
        if is_tuple and isinstance(value, list | tuple):
            values[name] = tuple(value)
        elif is_tuple:
            raise TypeError(f"{name} is {value!r}")
        for item in value if is_tuple else (value,):
            # To Python true is a number; to JSON it is not.
            if not isinstance(item, types) or (item is True or item is False) > (bool in types):
                raise TypeError(f"{name} is {value!r}")
    return kind(**values)


def _field_types(kind: Any) -> dict[str, tuple[bool, tuple[type, ...]]]:
    """Per field whether it is a tuple, and the types it (or an item of it) may have."""
    found = {}
    annotation: Any
    for name, annotation in kind.__annotations__.items():
        is_tuple = get_origin(annotation) is tuple
        inner = get_args(annotation)[0] if is_tuple else annotation
        choices = (inner,) if get_origin(inner) is Mapping else get_args(inner) or (inner,)
        types = {dict if get_origin(choice) is Mapping else choice for choice in choices}
        found[name] = (is_tuple, tuple(types | ({int} if float in types else set())))
    return found


_FIELD_TYPES: dict[Any, dict[str, tuple[bool, tuple[type, ...]]]] = {
    kind: _field_types(kind) for kind in (RunConfig, ExportManifest, DataFingerprint, Prediction)
}
