"""RunConfig -> RunRecord: the whole evaluation, one readable loop.

Everything that can fail without the model (questions, lengths, letters) fails before it is
loaded; the tokenizer is let go before that too, since both together would be the run's peak.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_eval import metrics
from edge_eval.environment import describe_machine, peak_memory, usable_cores
from edge_eval.errors import DataError, ModelError, ScoringError
from edge_eval.letters import ARABIC, LATIN
from edge_eval.model import LetterReader, letter_reader, open_model
from edge_eval.model_dir import read_manifest, size_on_disk, verify_hashes
from edge_eval.prompts import PROMPT_TEMPLATES, PromptTemplate, render
from edge_eval.questions import load_questions
from edge_eval.run_record import open_record, read_record
from edge_eval.schema import (
    EncodedPrompt,
    ExportManifest,
    LetterLogits,
    Prediction,
    Prompt,
    Question,
    QuestionSet,
    RunConfig,
    RunRecord,
    Status,
)
from edge_eval.scoring import SCORING_METHODS, decide, option_logits
from edge_eval.tokenization import (
    LetterTokens,
    encode_prompts,
    letter_tokens,
    load_tokenizer,
    vocabulary_size,
)

Progress = Callable[[int, int], None]  # questions done, questions in all


@dataclass(frozen=True, slots=True)
class Preparation:
    """All of a run that needs no forward pass."""

    manifest: ExportManifest
    questions: QuestionSet
    prompts: tuple[Prompt, ...]
    encoded: tuple[EncodedPrompt, ...]
    letters: LetterTokens  # the ten measured, in the order of letter_logits


def prepare(config: RunConfig, *, hashes: bool = True) -> Preparation:
    """Read the questions, render and tokenise every prompt, find the letters' ids.

    Errors: DataError, ModelError, ScoringError, each before the model is loaded.
    """
    directory = Path(config.model)
    manifest = read_manifest(directory)
    if hashes:
        verify_hashes(directory, manifest)
    questions = load_questions(config)
    prompts = tuple(render(question, config.template) for question in questions.test)
    tokenizer = load_tokenizer(directory)
    letters = ten_letters(tokenizer, PROMPT_TEMPLATES[config.template])
    encoded = tuple(encode_prompts(tokenizer, prompts))
    check_vocabulary(directory, manifest, encoded, vocabulary_size(tokenizer))
    if all(len(item.input_ids) > manifest.max_length for item in encoded):
        raise DataError(
            f"every prompt is longer than the {manifest.max_length} tokens that {manifest.name} "
            "can take: nothing can be scored."
        )
    return Preparation(manifest, questions, prompts, encoded, letters)


def check_vocabulary(
    directory: Path, manifest: ExportManifest, encoded: Sequence[EncodedPrompt], n_ids: int
) -> None:
    """Raise ModelError when the prompts hold ids the embedding table has no row for."""
    largest = max(int(item.input_ids.max(initial=0)) for item in encoded)
    if largest >= manifest.vocab_size:
        raise ModelError(
            f"the tokenizer in {directory} makes token {largest} and the model has "
            f"{manifest.vocab_size} (the tokenizer knows {n_ids}): it belongs to another model."
        )


def ten_letters(tokenizer: object, template: PromptTemplate) -> LetterTokens:
    """The token ids of the template's five letters, and of the other five where they have one.

    Errors: ScoringError when the template's own letters cannot be scored.
    """
    own = letter_tokens(tokenizer, template.letters, template.letter_prefix)
    other_letters = ARABIC if template.letters == LATIN else LATIN
    try:
        other = letter_tokens(tokenizer, other_letters, template.letter_prefix)
    except ScoringError:
        other = LetterTokens(other_letters, ((),) * 5, ((),) * 5)
    # Diagnostics are not worth a second pass: only the run's own letters may take several steps.
    ids = tuple(spelling if len(spelling) == 1 else () for spelling in other.ids)
    other = LetterTokens(other.letters, ids, other.pieces)
    first, second = (own, other) if template.letters == LATIN else (other, own)
    return LetterTokens(
        first.letters + second.letters, first.ids + second.ids, first.pieces + second.pieces
    )


def evaluate(
    config: RunConfig,
    record_path: Path,
    on_progress: Progress | None = None,
    *,
    hashes: bool = True,
) -> RunRecord:
    """Answer every question and leave a complete record at ``record_path``.

    Errors: EdgeEvalError of any kind; what was answered before one is kept in the record.
    """
    prepared = prepare(config, hashes=hashes)
    threads = config.threads or usable_cores()
    environment = describe_machine() | {"threads": threads}
    model = open_model(Path(config.model), prepared.manifest, threads)
    reader = letter_reader(model, prepared.letters.ids)
    fits = [
        item for item in prepared.encoded if len(item.input_ids) <= prepared.manifest.max_length
    ]
    first_s = _warm_up(reader, fits, config.warmup)
    scoring_facts = {
        "letters": prepared.letters.letters,
        "letter_ids": prepared.letters.ids,
        "letter_pieces": prepared.letters.pieces,
        "normalized": reader.normalized,
    }
    total = len(prepared.encoded)
    with open_record(
        record_path,
        config,
        prepared.manifest,
        prepared.questions.fingerprint,
        environment,
        scoring_facts,
    ) as record:
        rows = zip(prepared.questions.test, prepared.prompts, prepared.encoded, strict=True)
        for done, (question, prompt, encoded) in enumerate(rows, start=1):
            too_long = len(encoded.input_ids) > prepared.manifest.max_length
            logits = None if too_long else reader.read(encoded.input_ids)
            record.append(predict(question, prompt, encoded, logits, config, prepared.letters))
            if on_progress:
                on_progress(done, total)
        observed = {
            "load_s": model.load_s,
            "first_call_s": first_s,
            "disk_bytes": size_on_disk(prepared.manifest),
            **peak_memory(),
        }
        record.finish(observed, total)
    return read_record(record_path)


def _warm_up(reader: LetterReader, encoded: Sequence[EncodedPrompt], n: int) -> float | None:
    """Run prompts of the run's own lengths, shortest to longest; the first call's time."""
    by_length = sorted(encoded, key=lambda item: len(item.input_ids))
    first_s = None
    for step in range(min(n, len(by_length))):
        start = time.perf_counter()
        reader.read(by_length[(len(by_length) - 1) * step // max(1, n - 1)].input_ids)
        first_s = first_s or time.perf_counter() - start
    return first_s


def predict(
    question: Question,
    prompt: Prompt,
    encoded: EncodedPrompt,
    logits: LetterLogits | None,
    config: RunConfig,
    letters: LetterTokens,
) -> Prediction:
    """The option chosen from the logits, or why none was; ``logits`` None for a prompt too long."""
    values: tuple[float | None, ...] = (None,) * len(letters.letters)
    decision, status = None, Status.TOO_LONG
    if logits is not None:
        values = tuple(float(v) if math.isfinite(v) else None for v in logits.values)
        scores = SCORING_METHODS[config.scoring](
            option_logits(values, prompt.letters, letters.letters), prompt.letters
        )
        decision = decide(scores)
        status = Status.INVALID if decision.predicted is None else Status.SCORED
    return Prediction(
        question_id=question.id,
        group=question.group,
        subject=question.subject,
        level=question.level,
        country=question.country,
        has_context=bool(question.context),
        negated=metrics.is_negated(question.text),
        n_characters=len(question.context) + len(question.text),
        letters=prompt.letters,
        answer=question.answer,
        predicted=decision.predicted if decision else None,
        tied=decision.tied if decision else False,
        letter_logits=values,
        n_tokens=int(np.size(encoded.input_ids)),
        latency_s=logits.latency_s if logits else None,
        status=status,
    )
