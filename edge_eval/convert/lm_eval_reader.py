"""lm-evaluation-harness's results_DATE.json and samples_TASK_DATE.jsonl -> RunRecord.

Source: lm-evaluation-harness 0.4.13, loggers/evaluation_tracker.py, and files it wrote.
"""

import functools
import glob
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_eval.convert.foreign import foreign_record, predict, reason
from edge_eval.errors import RecordError
from edge_eval.model_dir import UNKNOWN
from edge_eval.prompts import PROMPT_TEMPLATES, PromptTemplate, render
from edge_eval.questions import (
    HUB_REPOSITORY,
    OPTIONS,
    fingerprint_questions,
    load_questions,
    parse_question,
)
from edge_eval.run_record import MAX_LINE_BYTES
from edge_eval.schema import DataFingerprint, Question, RunConfig, RunRecord
from edge_eval.scoring import PROTOCOLS

# What a record takes: counts, logits that were float32 once, and lines, of which names are parts.
MAX_COUNT = (1 << 31) - 1
MAX_LOGIT = float(np.finfo(np.float32).max)
MAX_NAME_CHARACTERS = 1 << 16

PRECISIONS = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


# What reading a value raises that is not of the kind that the harness writes.
_NOT_AS_WRITTEN = (ValueError, TypeError, AttributeError, OverflowError)


def read_lm_eval(path: Path, data: str | None = None) -> RunRecord:
    """Read a results file with the samples beside it, one samples file, or the folder of a run.

    data: questions to put the samples in the order of, so that the record's SHA-256 is that of a
    run on them. A sample that is not a template's rendering of its own question, or whose question
    is not the data's, is refused and counted.
    Errors: RecordError for files of another kind or task, and when every sample was refused.
    """
    results, files = _find_files(path)
    run = _read_run(path, results)
    given = load_questions(RunConfig(data=data)) if data else None
    known = {question.id: question for question in given.test} if given else {}
    read: dict[str, tuple[Question, list[float]]] = {}
    refused: list[str] = []
    template = ""
    for number, (place, sample) in enumerate(_samples(files), start=1):
        try:
            question = _question(sample, number)
            fitting = _find_template(sample, question, run.n_shots, chat=bool(run.chat_template))
            if fitting != (template or fitting) or question.id in read:
                raise ValueError(f"question {question.id} stands twice, or in another template")
            if given and known.get(question.id) != question:
                raise ValueError(f"question {question.id} is another one in {data}")
            logits = _logits(sample, question, PROMPT_TEMPLATES[fitting])
        except (*_NOT_AS_WRITTEN, LookupError, RecursionError) as error:
            refused.append(f"{place}: {reason(error)}")
            continue
        template = fitting
        read[question.id] = question, logits
    if not read:
        why = refused[0] if refused else "its samples files are empty"
        raise RecordError(f"{path} holds no sample of ArabicMMLU: {why}.")
    rows = [read[i] for i in known if i in read] if given else [*read.values()]
    letters = PROMPT_TEMPLATES[template].letters
    predictions = [
        predict(question, letters[: len(question.options)], logits, index, run.n_shots)
        for index, (question, logits) in enumerate(rows)
    ]
    fingerprint = DataFingerprint(
        source=given.fingerprint.source if given else run.data or path.name,
        kind=given.fingerprint.kind if given else "hub" if run.data else "file",
        revision=given.fingerprint.revision if given else None,
        sha256=fingerprint_questions(question for question, _ in rows),
        n_rows=len(read) + len(refused),
        n_refused=len(refused),
        n_selected=len(rows),
    )
    protocol, prompt, alphabet = _split_template(template)
    config = RunConfig(
        model=run.model,
        data=data or ("hub" if run.data else UNKNOWN),
        protocol=protocol,
        prompt=prompt,
        letters=alphabet,
        shots=run.n_shots,
        chat_template=run.chat_template or "off",
        system_prompt=run.system_prompt,
        warmup=0,
    )
    return foreign_record(
        "lm-evaluation-harness",
        config,
        fingerprint,
        predictions,
        refused,
        normalized=True,
        version=run.version,
        precision=run.precision,
        revision=run.revision,
        max_length=run.max_length,
    )


def _split_template(template: str) -> tuple[str, str, str]:
    """The protocol, prompt language and alphabet that make a RunConfig name this template."""
    if template in PROTOCOLS:
        protocol = PROTOCOLS[template]
        return template, protocol.prompt or "en", protocol.letters or "latin"
    prompt, _, alphabet = template.partition("-")
    return "paper", prompt, alphabet


def _find_files(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """The results, empty where there are none, and the samples files of the same run."""
    if path.is_dir():
        found = sorted(path.glob("results_*.json"))
        if len(found) != 1:
            raise RecordError(f"{path} has {len(found)} results_*.json: name one of them.")
        path = found[0]
    date = path.stem.rpartition("_")[2]
    results = path.with_name(f"results_{date}.json")
    samples = sorted(path.parent.glob(f"samples_*_{glob.escape(date)}.jsonl"))
    if path.name.startswith("samples_"):
        samples = [path]
    if not samples or not path.is_file():
        raise RecordError(
            f"{path} is no results or samples file of lm-evaluation-harness with its samples beside "
            "it: run the harness with --log_samples and --output_path."
        )
    if not results.is_file():
        return {}, samples
    try:
        with results.open("rb") as file:
            content = file.read(MAX_LINE_BYTES + 1)
        if len(content) > MAX_LINE_BYTES:
            raise ValueError(f"longer than {MAX_LINE_BYTES:,} bytes")
        found_results = json.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{results} cannot be read: {reason(error)}.") from error
    if not isinstance(found_results, dict):
        raise RecordError(f"{results} is not a results file: no JSON object.")
    return found_results, samples


@dataclass(frozen=True, slots=True)
class _Run:
    """What the results file says of the run; without one, what is then known of it."""

    model: str
    version: str
    precision: str
    revision: str | None
    max_length: int
    n_shots: int
    chat_template: str  # its SHA-256, "" for none
    system_prompt: str
    data: str  # the Hub's repository, "" for anything else


def _read_run(path: Path, results: Mapping[str, Any]) -> _Run:
    try:
        about = dict(results.get("config") or {})
        shots = {int(n) for n in dict(results.get("n-shot") or {}).values()}
        if not all(0 <= n <= MAX_COUNT for n in shots):
            raise ValueError("n-shot is no number of shots")
        if len(shots) > 1:
            raise RecordError(f"{path} has tasks of {sorted(shots)} shots: convert one at a time.")
        paths = {str(c.get("dataset_path")) for c in dict(results.get("configs") or {}).values()}
        max_length = int(results.get("max_length") or 0)
        run = _Run(
            model=str(results.get("model_name") or UNKNOWN),
            version=str(results.get("lm_eval_version") or UNKNOWN),
            precision=PRECISIONS.get(str(about.get("model_dtype")), UNKNOWN),
            revision=str(about.get("model_sha") or about.get("model_revision") or "") or None,
            # A tokenizer without a limit has 10**30 for it.
            max_length=max_length if 0 <= max_length <= MAX_COUNT else 0,
            n_shots=max(shots, default=0),
            chat_template=str(results.get("chat_template_sha") or ""),
            system_prompt=str(results.get("system_instruction") or ""),
            data=HUB_REPOSITORY if HUB_REPOSITORY in paths else "",
        )
        texts = (run.model, run.version, run.revision or "", run.chat_template, run.system_prompt)
        if max(map(len, texts)) > MAX_NAME_CHARACTERS:
            raise ValueError(f"a name or prompt of over {MAX_NAME_CHARACTERS:,} characters")
    except (*_NOT_AS_WRITTEN, RecursionError) as error:
        raise RecordError(
            f"{path}: its results are not lm-evaluation-harness's: {reason(error)}."
        ) from error
    return run


def _samples(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Every sample and where it stands."""
    for path in files:
        try:
            with path.open("rb") as file:
                lines = iter(functools.partial(file.readline, MAX_LINE_BYTES + 1), b"")
                for number, line in enumerate(lines, start=1):
                    if len(line) > MAX_LINE_BYTES:
                        raise ValueError(f"line {number} is longer than {MAX_LINE_BYTES:,} bytes")
                    yield f"{path.name}, line {number}", json.loads(line.decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"{path} cannot be read as JSON Lines: {reason(error)}.") from error


def _question(sample: Any, number: int) -> Question:
    """The question as the harness saw it; ValueError when it is none."""
    row = {name: "" if cell is None else str(cell) for name, cell in sample["doc"].items()}
    for name in OPTIONS:
        # The harness asks `if not doc[option]`, so that a 0 read as a number ends the options.
        row[name] = row.get(name, "") if sample["doc"].get(name) else ""
    question = parse_question(row, number)
    if isinstance(question, str):
        raise ValueError(question)
    return question


def _find_template(sample: Any, question: Question, n_shots: int, *, chat: bool) -> str:
    """The template that the sample's prompt was written by; ValueError when it is none of ours."""
    prompt = sample["arguments"]["gen_args_0"]["arg_0"]
    for template in PROMPT_TEMPLATES:
        text = render(question, template).text
        if (text in prompt) if chat else prompt.endswith(text) if n_shots else prompt == text:
            return template
    raise ValueError("its prompt is none of ArabicMMLU's for its question")


def _logits(sample: Any, question: Question, wording: PromptTemplate) -> list[float]:
    """The letters' log-probabilities; ValueError where they are not of the template's letters."""
    arguments = list(sample["arguments"].values())
    asked = [wording.letter_prefix + letter for letter in wording.letters[: len(question.options)]]
    if [argument["arg_1"] for argument in arguments] != asked:
        raise ValueError("it scored other continuations than the letters")
    logits = [float(resp[0]) for resp in sample["filtered_resps"]]
    if len(logits) != len(asked):
        raise ValueError(f"it has {len(logits)} responses for {len(asked)} options")
    if any(math.isfinite(logit) and abs(logit) > MAX_LOGIT for logit in logits):
        raise ValueError("a response is beyond what single precision holds")
    if all(map(math.isfinite, logits)):
        correct = logits.index(max(logits)) == question.answer
        if correct != bool(sample.get("acc", correct)):
            raise ValueError("its acc is not what its responses and answer give")
    return logits
