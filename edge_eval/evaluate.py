"""RunConfig -> RunRecord: the whole evaluation, one readable loop.

Everything that can fail without the model (questions, lengths, letters) fails before it is
loaded; the tokenizer is let go before that too, since both together would be the run's peak.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_eval import metrics
from edge_eval.endpoint import Endpoint, check_url, open_endpoint
from edge_eval.environment import (
    describe_machine,
    peak_memory,
    release_memory,
    usable_cores,
)
from edge_eval.errors import OptionError, RecordError
from edge_eval.generated import bounded, draw_option
from edge_eval.model import LetterModel, LetterReader, TextReader, letter_reader
from edge_eval.model_dir import size_on_disk
from edge_eval.onnx_folder import open_any_model
from edge_eval.prefixes import BUDGET_BYTES, PrefixStack, Step, plan, streams
from edge_eval.preparation import Preparation, check_settings, decoder_input, prepare, scoring_facts
from edge_eval.prompts import rotate
from edge_eval.run_record import (
    check_same_run,
    find_unfinished,
    new_record,
    other_environment,
    read_record,
    resume_record,
)
from edge_eval.schema import (
    Answer,
    EncodedPrompt,
    GeneratedText,
    LetterLogits,
    Prediction,
    RunConfig,
    RunRecord,
    Status,
)
from edge_eval.scoring import (
    PROTOCOLS,
    SCORING_METHODS,
    TEXT_SCORING_METHODS,
    Decision,
    decide,
    option_logits,
)
from edge_eval.streams import SharedIterator, merge
from edge_eval.tokenization import (
    control_ids,
    load_tokenizer,
)

Progress = Callable[[int, int], None]  # prompts done, prompts in all
Reader = LetterReader | TextReader


def evaluate(
    config: RunConfig,
    record_path: Path,
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] | None = None,
    *,
    hashes: bool = True,
) -> RunRecord:
    """Answer every question and leave a complete record at ``record_path``.

    A record that the same run left unfinished there is gone on with.
    Errors: EdgeEvalError of any kind; what was answered before one is kept in the record.
    """
    return evaluate_together([config], [record_path], on_progress, on_note, hashes=hashes)[0]


def evaluate_together(
    configs: Sequence[RunConfig],
    record_paths: Sequence[Path],
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] | None = None,
    *,
    hashes: bool = True,
) -> list[RunRecord]:
    """Several runs of one model at once, a record each; they may share prompts' beginnings.

    The configs differ in how questions are put, not in model, scenario, reuse or threads.
    Errors: as evaluate().
    """
    first = configs[0]
    for config in configs:
        check_settings(config)
    begun = [find_unfinished(path) for path in record_paths]
    if all(record is not None and record.complete for record in begun):
        raise RecordError(
            f"{record_paths[0]} exists already and is complete: name another with -o, or remove it."
        )
    cells = [prepare(first, hashes=hashes)]
    cells += [prepare(config, manifest=cells[0].manifest) for config in configs[1:]]
    if on_note:
        for note in dict.fromkeys(note for cell in cells for note in cell.notes):
            on_note(note)
    if cells[0].manifest.encoder_decoder:
        configs = [replace(config, reuse="none") for config in configs]
        first = configs[0]
    environment = describe_machine() | _streams(first)
    runs = [
        new_record(
            config,
            cell.manifest,
            cell.questions.fingerprint,
            environment,
            scoring_facts(cell, config),
        )
        for config, cell in zip(configs, cells, strict=True)
    ]
    for path, there, run in zip(record_paths, begun, runs, strict=True):
        if there is not None:
            check_same_run(path, there, run)
            if on_note:
                on_note(_resume_note(path, there, run))
    del begun, there  # of a run that goes on, all that was answered
    with contextlib.ExitStack() as stack:
        answering = (_ask_endpoint if first.endpoint else _ask_model)(cells, configs, environment)
        stack.callback(answering.close)
        records = [
            stack.enter_context(resume_record(path, run))
            for path, run in zip(record_paths, runs, strict=True)
        ]
        # A list of pairs: which run, which of its prompts.
        jobs = [
            (c, i)
            for c, cell in enumerate(cells)
            for i in range(len(cell.prompts))
            if i not in records[c].answered
        ]
        n_before = sum(len(record.answered) for record in records)
        if on_progress and n_before:
            on_progress(n_before, n_before + len(jobs))
        started = time.perf_counter()
        for done, (job, answer) in enumerate(answering.answer(jobs), start=1):
            c, i = jobs[job]
            records[c].append(predict(cells[c], i, answer, configs[c]))
            if on_progress:
                on_progress(n_before + done, n_before + len(jobs))
        observed = {
            # Of all the runs together: none of them ran alone.
            "wall_s": time.perf_counter() - started,
            "n_prompts_together": len(jobs),
            **answering.observe(),
        }
        for record, cell in zip(records, cells, strict=True):
            record.finish(observed, len(cell.prompts))
    return [read_record(path) for path in record_paths]


Job = tuple[int, int]  # which run, which of its prompts


@dataclass(frozen=True, slots=True)
class Answering:
    """Where a run's answers come from: a model opened here, or an endpoint."""

    answer: Callable[[Sequence[Job]], Iterator[tuple[int, Answer | None]]]
    observe: Callable[[], Mapping[str, Any]]  # what was seen once, told at the end
    close: Callable[[], None] = lambda: None


def _ask_model(
    cells: Sequence[Preparation], configs: Sequence[RunConfig], environment: Mapping[str, Any]
) -> Answering:
    """Open the model and warm it up."""
    config, manifest = configs[0], cells[0].manifest
    release_memory()
    model = open_any_model(Path(config.model), manifest, environment["threads"])
    if config.reuse == "shared" and not model.continues:
        raise OptionError(
            f"{config.model} cannot go on from the beginning of a prompt (its graph takes no past, "
            "or not faithfully), so there is nothing to reuse: run it with --reuse none."
        )
    readers = [_reader(model, *pair) for pair in zip(cells, configs, strict=True)]
    first_s = _warm_up(readers[0], _fitting(cells[0]), config.warmup)

    def observe() -> dict[str, Any]:
        seen = {"load_s": model.load_s, "first_call_s": first_s}
        return seen | {"disk_bytes": size_on_disk(manifest)} | peak_memory()

    def answer(jobs: Sequence[Job]) -> Iterator[tuple[int, Answer | None]]:
        return _answer(cells, readers, jobs, config, environment["streams"])

    return Answering(answer, observe)


def _reader(model: LetterModel, cell: Preparation, config: RunConfig) -> Reader:
    """What reads a model's answer off it: its letters' logits, or the text it writes."""
    model = model.answering_behind(decoder_input(config, cell.manifest))
    if config.scoring not in TEXT_SCORING_METHODS:
        normalized = PROTOCOLS[config.protocol].normalized
        return letter_reader(model, cell.letters.ids, normalized=normalized)
    # Loaded again, and kept: texts are read as they come.
    tokenizer = load_tokenizer(Path(config.model))
    return TextReader(model, config.max_new_tokens, control_ids(tokenizer), tokenizer.decode)


def _ask_endpoint(
    cells: Sequence[Preparation],
    configs: Sequence[RunConfig],
    environment: Mapping[str, Any],  # noqa: ARG001 - one signature
) -> Answering:
    """Ask the endpoint once, so that what is wrong with it is told before a record is begun."""
    config = configs[0]
    endpoint = connect(config)

    def ask(job: Job) -> Answer | None:
        cell, settings = cells[job[0]], configs[job[0]]
        request = cell.requests[job[1]]
        if settings.scoring in TEXT_SCORING_METHODS:
            return endpoint.read_text(request, settings.max_new_tokens)
        letters = tuple(text for (text,) in cell.letters.pieces)
        return endpoint.read_letters(request, letters, settings.top_logprobs)

    started = time.perf_counter()
    ask((0, 0))
    first_s = time.perf_counter() - started

    def answer(jobs: Sequence[Job]) -> Iterator[tuple[int, Answer | None]]:
        waiting = SharedIterator(enumerate(jobs))
        sources = [((n, ask(job)) for n, job in waiting) for _ in range(config.concurrency)]
        return merge(sources, wait=False)

    def observe() -> dict[str, Any]:
        return {"first_call_s": first_s, "n_retries": endpoint.n_retries}

    return Answering(answer, observe, endpoint.close)


def connect(config: RunConfig) -> Endpoint:
    """The endpoint that a run asks. Errors: OptionError, as check_url() and open_endpoint()."""
    return open_endpoint(
        check_url(config.endpoint),
        config.model,
        is_chat=config.chat_template == "server",
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
    )


def choose_scoring(config: RunConfig) -> str:
    """How an endpoint is scored if nothing was said: by letters where it tells of them."""
    check_settings(config)
    question = "Answer:"
    is_chat = config.chat_template == "server"
    request = (
        {"messages": [{"role": "user", "content": question}]} if is_chat else {"prompt": question}
    )
    endpoint = connect(config)
    try:
        return "argmax" if endpoint.gives_letters(request, config.top_logprobs) else "generated"
    finally:
        endpoint.close()


def _resume_note(path: Path, there: RunRecord, here: RunRecord) -> str:
    unlike = other_environment(there, here)
    elsewhere = (
        f" It was begun with other {', '.join(unlike)}; both are recorded." if unlike else ""
    )
    return f"{path} goes on: {len(there.predictions):,} answers are there already.{elsewhere}"


def _streams(config: RunConfig) -> dict[str, Any]:
    """Streams and threads a stream: one and all cores, or all cores and one (MLPerf's scenarios)."""
    if config.endpoint:
        return {"threads": None, "streams": config.concurrency}  # the server's, unknown
    cores = config.threads or usable_cores()
    streams, threads = (cores, 1) if config.scenario == "offline" else (1, cores)
    return {"threads": threads, "streams": streams}


def _fitting(prepared: Preparation) -> list[EncodedPrompt]:
    limit = prepared.manifest.max_length
    return [item for item in prepared.encoded if len(item.input_ids) <= limit]


def _answer(
    cells: Sequence[Preparation],
    readers: Sequence[Reader],
    jobs: Sequence[Job],
    config: RunConfig,
    n_streams: int,
) -> Iterator[tuple[int, Answer | None]]:
    """Each job's index and answer as they come; None for a prompt that is too long."""
    encoded = [cells[c].encoded[i] for c, i in jobs]
    limit = cells[0].manifest.max_length
    fits = [job for job, item in enumerate(encoded) if len(item.input_ids) <= limit]
    yield from ((job, None) for job in sorted(set(range(len(jobs))) - set(fits)))

    def read(job: int) -> tuple[int, Answer]:
        return job, readers[jobs[job][0]].read(encoded[job].input_ids)

    def read_sharing(steps: Sequence[Step]) -> Iterator[tuple[int, Answer]]:
        stack = PrefixStack(readers[0].model, BUDGET_BYTES // n_streams)
        for step in steps:
            job = fits[step.index]
            start = time.perf_counter()
            past, rest = stack.begin(encoded[job].input_ids, step)
            answer = readers[jobs[job][0]].read(rest, past)
            # The beginning's time belongs to the question that needed it first.
            yield job, replace(answer, latency_s=time.perf_counter() - start)

    if config.reuse == "shared":
        steps = plan([encoded[job] for job in fits])
        yield from merge(read_sharing(part) for part in streams(steps, n_streams))
    elif n_streams == 1:
        yield from map(read, fits)
    else:
        # Longest first: the last to finish is then a short one.
        waiting = SharedIterator(sorted(fits, key=lambda job: -len(encoded[job].input_ids)))
        yield from merge(map(read, waiting) for _ in range(n_streams))


def _warm_up(reader: Reader, encoded: Sequence[EncodedPrompt], n: int) -> float | None:
    """Run prompts of the run's own lengths, shortest to longest; the first call's time."""
    by_length = sorted(encoded, key=lambda item: len(item.input_ids))
    first_s = None
    for step in range(min(n, len(by_length))):
        start = time.perf_counter()
        reader.read(by_length[(len(by_length) - 1) * step // max(1, n - 1)].input_ids)
        first_s = first_s or time.perf_counter() - start
    return first_s


def predict(
    prepared: Preparation, index: int, answer: Answer | None, config: RunConfig
) -> Prediction:
    """The option chosen from an answer, or why none was; ``answer`` None for a prompt too long."""
    prompt, letters = prepared.prompts[index], prepared.letters.letters
    question = rotate(prepared.asked[index], prompt.rotation)
    values: tuple[float | None, ...] = (None,) * len(letters)
    decision, status = None, Status.TOO_LONG
    generated, matched = None, None
    if isinstance(answer, LetterLogits):
        values = tuple(float(v) if math.isfinite(v) else None for v in answer.values)
        scores = SCORING_METHODS[config.scoring](
            option_logits(values, prompt.letters, letters), prompt.letters
        )
        decision = decide(scores, partial=bool(config.endpoint))
    elif isinstance(answer, GeneratedText):
        decision = Decision(None, tied=False)
        if answer.text is not None:
            generated = bounded(answer.text)
            found = TEXT_SCORING_METHODS[config.scoring](generated, prompt.letters)
            matched = found is not None
            drawn = draw_option(config.seed, question.id, prompt.rotation, len(prompt.letters))
            decision = Decision(drawn if found is None else found, tied=False)
    if decision is not None and decision.predicted is not None:
        status = Status.SCORED
    elif decision is not None:
        status = Status.UNSEEN if config.endpoint else Status.INVALID
    n_tokens = len(prepared.encoded[index].input_ids) if prepared.encoded else 0
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
        n_tokens=answer.n_tokens if answer and answer.n_tokens else n_tokens,
        latency_s=answer.latency_s if answer else None,
        status=status,
        n_shots=prompt.n_shots,
        rotation=prompt.rotation,
        index=index,
        generated=generated,
        matched=matched,
    )
