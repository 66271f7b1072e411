"""RunRecord <-> the CSV that the paper's script writes: input, golds, options, preds, probs.

Source: mbzuai-nlp/ArabicMMLU, evaluate.py at 097a316. Its rows have no ids: a row is recognised by
its prompt among the prompts of the data's questions, equal prompts in the data's order.
"""

import ast
import csv
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np

from edge_eval.convert.foreign import ask_again, foreign_record, new_file, predict, reason
from edge_eval.errors import RecordError
from edge_eval.metrics import letter_probabilities
from edge_eval.model_dir import UNKNOWN
from edge_eval.prompts import PROMPT_TEMPLATES, render
from edge_eval.questions import MAX_ROW_CHARACTERS, fingerprint_questions, load_questions
from edge_eval.schema import Question, RunConfig, RunRecord

COLUMNS = ("input", "golds", "options", "preds", "probs")
TEMPLATES = {
    f"{prompt}-{letters}": (prompt, letters)
    for prompt in ("en", "ar")
    for letters in ("latin", "arabic")
}

# A probability printed as 0 has underflowed single precision.
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def write_official(record: RunRecord, output: Path, data: str | None = None) -> None:
    """Write a run of the paper's protocol; a question not scored has no pred and no probs.

    Errors: RecordError for another protocol, and those of ask_again.
    """
    if record.config.protocol != "paper":
        raise RecordError(
            f"{record.path} was run by protocol {record.config.protocol}; the official columns are "
            "for the paper's."
        )
    mark = ". " if record.config.letters == "latin" else "- "
    rows = ask_again(record, data)
    with new_file(output) as file:
        # Python quotes a cell for the characters of its line end alone, so both are needed.
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(COLUMNS)
        for asked in rows:
            p = asked.prediction
            lettered = zip(p.letters, asked.question.options, strict=True)
            options = [f"{letter}{mark}{text}" for letter, text in lettered]
            pred, probs = "", ""
            if p.predicted is not None:
                pred = p.letters[p.predicted]
                probs = str(letter_probabilities(p).astype(np.float32))
            writer.writerow([asked.prompt.text, p.answer, options, pred, probs])


def read_official(path: Path, data: str | None = None) -> RunRecord:
    """Read a file of the paper's script as a run of the protocol "paper".

    data: the questions it was made from; the script always takes the whole benchmark.
    Errors: RecordError for a file of another kind, or when no row is one of the data's questions.
    """
    source = data or "hub"
    rows = list(_rows(path))
    questions = load_questions(RunConfig(data=source))
    template, waiting = _find_template(path, rows, questions.test)
    found: list[Question] = []
    predictions, refused = [], []
    for line, row in rows:
        question = waiting[row["input"]].popleft() if waiting[row["input"]] else None
        answered = (
            "its prompt is none of the data's" if question is None else _answer(row, question)
        )
        if question is None or isinstance(answered, str):
            refused.append(f"row {line}: {reason(answered)}")
            continue
        letters = PROMPT_TEMPLATES[template].letters[: len(question.options)]
        predictions.append(predict(question, letters, answered, len(found)))
        found.append(question)
    if not predictions:
        raise RecordError(f"{path}: no row is a question of {source}; {refused[0]}.")
    prompt, letters_name = TEMPLATES[template]
    name = re.fullmatch(r"result_prompt_(?:en|ar)_alpa_(?:en|ar)_(.+)", path.stem)
    config = RunConfig(
        model=name[1] if name else UNKNOWN,
        data=source,
        prompt=prompt,
        letters=letters_name,
        warmup=0,
    )
    fingerprint = replace(
        questions.fingerprint,
        sha256=fingerprint_questions(found),
        n_rows=len(rows),
        n_refused=len(refused),
        n_selected=len(found),
    )
    return foreign_record(
        "ArabicMMLU's evaluate.py", config, fingerprint, predictions, refused, normalized=False
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row's number, from 1 on, and its cells."""
    n_characters = 0

    def lines(file: TextIO) -> Iterator[str]:
        nonlocal n_characters
        while text := file.readline(MAX_ROW_CHARACTERS + 1):
            n_characters += len(text)
            if n_characters > MAX_ROW_CHARACTERS:
                raise csv.Error(f"a row of over {MAX_ROW_CHARACTERS:,} characters")
            yield text

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(lines(file), strict=True)
            missing = set(COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise RecordError(
                    f"{path} is not the official script's: it has no column {min(missing)}."
                )
            for number, row in enumerate(reader, start=1):
                n_characters = 0
                cells = {name: row[name] for name in COLUMNS}
                if None in cells.values():
                    raise RecordError(f"{path}, row {number}: fewer cells than columns.")
                yield number, cells
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is not CSV in UTF-8 ({error}).") from error


def _find_template(
    path: Path, rows: Sequence[tuple[int, dict[str, str]]], questions: Sequence[Question]
) -> tuple[str, dict[str, deque[Question]]]:
    """The template that the first rows were written by, and the questions by their prompts."""
    for template in TEMPLATES:
        waiting: dict[str, deque[Question]] = defaultdict(deque)
        for question in questions:
            waiting[render(question, template).text].append(question)
        if any(row["input"] in waiting for _, row in rows):
            return template, waiting
    raise RecordError(
        f"{path}: none of its {len(rows):,} prompts is the paper's for a question of the data: name "
        "the data it was made from with --data."
    )


def _answer(row: Mapping[str, str], question: Question) -> list[float] | str:
    """The letters' log-probabilities, none for a row without, or what is wrong with the row."""
    if row["golds"] != str(question.answer):
        return f"its gold is {row['golds']!r} and the question's answer {question.answer}"
    if not row["preds"]:
        return []
    try:
        options = ast.literal_eval(row["options"])
        letters = [str(option)[0] for option in options]
        predicted = letters.index(row["preds"])
        probabilities = [float(word) for word in row["probs"].strip("[] \n").split()]
    except (ValueError, SyntaxError, TypeError, IndexError, RecursionError, MemoryError) as error:
        return f"its options, preds or probs cannot be read ({error})"
    if not len(options) == len(probabilities) == len(question.options):
        counts = f"{len(options)} options and {len(probabilities)} probs"
        return f"it has {counts}, and the question {len(question.options)} options"
    if not all(0 <= p <= 1 for p in probabilities) or probabilities[predicted] < max(probabilities):
        return "its probs are no probabilities, or its pred is not the largest"
    return [math.log(max(p, SMALLEST)) for p in probabilities]
