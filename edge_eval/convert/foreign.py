"""What all formats share: a record's questions asked again, and a record of what others ran.

What a foreign file does not tell is marked: text is "unknown", a number that must be one is 0,
anything else False or None, and ``observed["unknown"]`` lists the fields by name.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import numpy as np

from edge_eval.errors import RecordError
from edge_eval.letters import OPTION_LETTERS
from edge_eval.metrics import has_probabilities, is_negated
from edge_eval.model_dir import UNKNOWN, unknown_manifest
from edge_eval.prompts import render
from edge_eval.questions import fingerprint_questions, load_questions
from edge_eval.run_record import open_record
from edge_eval.schema import (
    DataFingerprint,
    Prediction,
    Prompt,
    Question,
    RunConfig,
    RunRecord,
    Status,
)
from edge_eval.scoring import Decision, decide

N_REFUSED_KEPT = 100
MAX_REASON_CHARACTERS = 300

# What no foreign file tells.
UNKNOWN_FIELDS = (
    *("manifest.architecture", "manifest.graph", "manifest.n_layers", "manifest.hidden_size"),
    *("manifest.vocab_size", "manifest.sliding_window", "manifest.tied_embedding"),
    *("manifest.embedding_scale", "manifest.head_bias", "manifest.head_scale"),
    *("manifest.head_softcap", "manifest.files", "manifest.parity", "scoring.letter_ids"),
    *("environment", "predictions.n_tokens", "predictions.latency_s"),
    *("observed.load_s", "observed.disk_bytes", "observed.peak_memory_bytes"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, as it was put to the model, and what became of it."""

    question: Question
    prompt: Prompt
    prediction: Prediction


def ask_again(record: RunRecord, data: str | None) -> list[Asked]:
    """The questions and prompts of a record, which holds neither, in the record's order.

    data: where the questions are, if not where the run had them.
    Errors: RecordError for an incomplete run or another scoring than argmax, for prompts that only
    the model's own tokenizer and chat template could make again, and for data that is not the
    run's, by its SHA-256.
    """
    config, source = record.config, data or record.config.data
    if not record.complete:
        raise RecordError(f"{record.path} is not complete: its files would look as if it were.")
    if config.chat_template != "off" or (config.shots and config.protocol == "paper"):
        raise RecordError(
            f"{record.path} was run with shots or a chat template, so its prompts depend on the "
            "model's tokenizer and cannot be written from the record. Convert it --to csv."
        )
    if config.scoring != "argmax":
        raise RecordError(
            f"{record.path} is scored by {config.scoring}, and these files mean the largest logit: "
            "rescore it by argmax first."
        )
    if any(p.status is Status.SCORED and not has_probabilities(p) for p in record.predictions):
        raise RecordError(
            f"{record.path} keeps no value for some letters, which were not among the tokens its "
            "endpoint told of: these files need all. Convert it --to csv."
        )
    # A record names its source, but who converts it asked for no fetch.
    found = load_questions(RunConfig(data=source), fetch=data is not None)
    by_id = {question.id: question for question in found.test}
    predictions = [p for p in record.predictions if p.rotation == 0]
    questions = [by_id[p.question_id] for p in predictions if p.question_id in by_id]
    if fingerprint_questions(questions) != record.data.sha256:
        raise RecordError(
            f"{source} does not hold the questions of {record.path} (their SHA-256 differs): name "
            "the file they were read from with --data."
        )
    asked = []
    for question, prediction in zip(questions, predictions, strict=True):
        same = (question.context, question.text, question.options)
        shots = [
            shot
            for shot in found.shots.get(question.task, ())
            if (shot.context, shot.text, shot.options) != same
        ]
        prompt = render(question, config.template, shots[: prediction.n_shots])
        asked.append(Asked(question, prompt, prediction))
    return asked


def predict(
    question: Question,
    letters: Sequence[str],
    logits: Sequence[float],
    index: int,
    n_shots: int = 0,
) -> Prediction:
    """A Prediction from another tool's numbers.

    logits: one per letter, up to a constant; none for a question that the tool did not answer.
    """
    decision = decide(np.array(logits, dtype=np.float64)) if logits else Decision(None, tied=False)
    row: list[float | None] = [None] * len(OPTION_LETTERS)
    start = OPTION_LETTERS.index(letters[0])
    row[start : start + len(logits)] = [v if math.isfinite(v) else None for v in logits]
    return Prediction(
        question_id=question.id,
        group=question.group,
        subject=question.subject,
        level=question.level,
        country=question.country,
        has_context=bool(question.context),
        negated=is_negated(question.text),
        n_characters=len(question.context) + len(question.text),
        letters=tuple(letters),
        answer=question.answer,
        predicted=decision.predicted,
        tied=decision.tied,
        letter_logits=tuple(row),
        n_tokens=0,
        latency_s=None,
        status=Status.INVALID if decision.predicted is None else Status.SCORED,
        n_shots=n_shots,
        index=index,
    )


def foreign_record(
    tool: str,
    config: RunConfig,
    data: DataFingerprint,
    predictions: Sequence[Prediction],
    refused: Sequence[str],
    *,
    normalized: bool,
    version: str = UNKNOWN,
    precision: str = UNKNOWN,
    revision: str | None = None,
    max_length: int = 0,
) -> RunRecord:
    """A complete record of a run that another tool made, with the rest marked unknown.

    refused: rows that are no scored question, and why; the first are kept in the record.
    """
    manifest = unknown_manifest(
        config.model,
        config.model,
        {tool: version},
        revision=revision,
        precision=precision,
        max_length=max_length,
    )
    return RunRecord(
        config=config,
        manifest=manifest,
        data=data,
        scoring={"letters": OPTION_LETTERS, "letter_ids": None, "normalized": normalized},
        environment={"cpu_model": None, "architecture": UNKNOWN, "instruction_sets": None},
        observed={
            "converted_from": tool,
            "unknown": list(UNKNOWN_FIELDS),
            "refused": list(refused[:N_REFUSED_KEPT]),
        },
        predictions=tuple(predictions),
        complete=True,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def reason(error: object) -> str:
    """Why something was refused, on one line and short; a file's cells, which it names, are not."""
    return " ".join(str(error).split())[:MAX_REASON_CHARACTERS].rstrip(".")


def save_record(record: RunRecord, output: Path) -> None:
    """Write a whole record at once.

    Errors: RecordError when the file exists or cannot be written.
    """
    with open_record(
        output, record.config, record.manifest, record.data, record.environment, record.scoring
    ) as writer:
        for prediction in record.predictions:
            writer.append(prediction)
        writer.finish(record.observed, len(record.predictions))


@contextlib.contextmanager
def new_file(path: Path, encoding: str = "utf-8") -> Iterator[TextIO]:
    """A text file that was not there before.

    Errors: RecordError when it exists or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding=encoding, newline="\n") as file:
            yield file
    except FileExistsError:
        raise RecordError(f"{path} exists already: name another with -o, or remove it.") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}.") from error
