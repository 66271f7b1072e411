"""RunRecord <-> JSON Lines: one header, one line a question as it is answered, one end marker.

Schema history, newest first:
    1  2026-11  the first

Strict JSON (no NaN), UTF-8. A run that was killed keeps every line but the one in flight.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge_eval.errors import RecordError
from edge_eval.schema import (
    DataFingerprint,
    ExportManifest,
    Prediction,
    RunConfig,
    RunRecord,
    Status,
)

SCHEMA_VERSION = 1


def to_json(value: object) -> str:
    """One line of strict JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _header(
    config: RunConfig,
    manifest: ExportManifest,
    data: DataFingerprint,
    environment: Mapping[str, Any],
    scoring_facts: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "kind": "header",
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": dataclasses.asdict(config),
        "manifest": dataclasses.asdict(manifest),
        "data": dataclasses.asdict(data),
        "scoring": dict(scoring_facts),
        "environment": dict(environment),
    }


class RecordWriter:
    """Appends a run to its file, line by line, each flushed before the next question."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8", newline="\n")
        except FileExistsError:
            raise RecordError(
                f"{path} exists already: name another with -o, or remove it."
            ) from None
        except OSError as error:
            raise RecordError(
                f"{path} cannot be written: {error.strerror}. Name a place you can write with -o."
            ) from error
        self.path = path
        self._write(header)

    def append(self, prediction: Prediction) -> None:
        """Write one prediction."""
        self._write({"kind": "prediction", **dataclasses.asdict(prediction)})

    def finish(self, observed: Mapping[str, Any], n_predictions: int) -> None:
        """Write the end marker: the record is complete."""
        self._write({"kind": "end", "n_predictions": n_predictions, "observed": dict(observed)})
        os.fsync(self._file.fileno())

    def _write(self, value: dict[str, Any]) -> None:
        try:
            self._file.write(to_json(value) + "\n")
            self._file.flush()
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be written further: {error.strerror}. What was answered "
                "before is kept in it."
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
    return RecordWriter(path, _header(config, manifest, data, environment, scoring_facts))


def read_record(path: Path) -> RunRecord:
    """A run record; a torn last line is left out, anything else unreadable is an error.

    Errors: RecordError with the line's number.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error
    header: dict[str, Any] | None = None
    observed: dict[str, Any] | None = None
    predictions: list[Prediction] = []
    lines = raw.split(b"\n")
    torn = lines.pop()  # what stands behind the last line end: empty, or a line cut short
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
            kind = entry["kind"]
            if kind == "header" and number == 1:
                header = entry
                _check_version(path, entry)
            elif kind == "prediction" and header is not None and observed is None:
                predictions.append(_prediction(entry))
            elif kind == "end" and header is not None and observed is None:
                observed = entry["observed"]
                if entry["n_predictions"] != len(predictions):
                    raise ValueError(f"the end marker counts {entry['n_predictions']} questions")
            else:
                raise ValueError(f"unexpected {kind!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordError(
                f"{path}, line {number}: not a line of a run record ({error})."
            ) from error
    if header is None:
        raise RecordError(f"{path} is empty or has no whole header: not a run record.")
    if torn and observed is not None:
        raise RecordError(f"{path} goes on behind its end marker: two runs wrote to one file.")
    try:
        return RunRecord(
            config=_config(header["config"]),
            manifest=ExportManifest(**header["manifest"]),
            data=DataFingerprint(**header["data"]),
            scoring=header["scoring"],
            environment=header["environment"],
            observed=observed or {},
            # Streams answer in their own order; the data's order is the same in every scenario.
            predictions=tuple(sorted(predictions, key=lambda p: p.index)),
            complete=observed is not None,
            created=header["created"],
            path=str(path),
        )
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path}, line 1: the header lacks something ({error}).") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_version(path: Path, header: dict[str, Any]) -> None:
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{path} is a run record of schema version {version!r}; this edge-eval reads "
            f"{SCHEMA_VERSION}."
        )


def _config(fields: dict[str, Any]) -> RunConfig:
    values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return RunConfig(**values)


def _prediction(entry: dict[str, Any]) -> Prediction:
    fields = {name: value for name, value in entry.items() if name != "kind"}
    fields["status"] = Status(fields["status"])
    fields["letters"] = tuple(fields["letters"])
    fields["letter_logits"] = tuple(fields["letter_logits"])
    return Prediction(**fields)
