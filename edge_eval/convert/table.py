"""RunRecord -> CSV for a spreadsheet: one row per prediction."""

import csv
from pathlib import Path

from edge_eval.convert.foreign import new_file
from edge_eval.letters import OPTION_LETTERS
from edge_eval.schema import Prediction, RunRecord

COLUMNS = (
    *("question_id", "group", "subject", "level", "country", "task", "has_context", "negated"),
    *("n_characters", "n_options", "rotation", "answer", "predicted", "correct", "tied", "status"),
    *("n_shots", "n_tokens", "latency_ms"),
    *(f"logit_{letter}" for letter in OPTION_LETTERS),
    *("generated", "matched"),
)


def write_table(record: RunRecord, output: Path, data: str | None = None) -> None:  # noqa: ARG001
    """Write the predictions; a byte-order mark lets spreadsheets know that it is UTF-8."""
    with new_file(output, encoding="utf-8-sig") as file:
        # Python quotes a cell for the characters of its line end alone, so both are needed.
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(COLUMNS)
        for prediction in record.predictions:
            writer.writerow([_harmless(cell) for cell in _row(prediction)])


def _row(p: Prediction) -> list[object]:
    return [
        *(p.question_id, p.group, p.subject, p.level, p.country, p.task, p.has_context, p.negated),
        *(p.n_characters, len(p.letters), p.rotation, p.letters[p.answer]),
        *("" if p.predicted is None else p.letters[p.predicted], p.correct, p.tied, p.status.value),
        *(p.n_shots, p.n_tokens, "" if p.latency_s is None else p.latency_s * 1e3),
        *p.letter_logits,
        *(p.generated, p.matched),
    ]


def _harmless(cell: object) -> object:
    """Text that a spreadsheet would run as a formula, with an apostrophe before it."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


# Full-width forms too: some spreadsheets fold them.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
