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
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_eval.asking import AskedPrompts
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
from edge_eval.run_record import (
    Begun,
    RecordWriter,
    check_same_run,
    find_unfinished,
    new_record,
    other_environment,
    read_record,
    resume_record,
)
from edge_eval.schema import (
    Answer,
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
Jobs: TypeAlias = npt.NDArray[np.int32]  # (jobs, 2): which run, which of its prompts


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
    _answer_all(configs, record_paths, on_progress, on_note, hashes=hashes)
    # The model and the prompts are gone, and what they took serves for the records.
    return [read_record(path) for path in record_paths]


def _answer_all(
    configs: Sequence[RunConfig],
    record_paths: Sequence[Path],
    on_progress: Progress | None,
    on_note: Callable[[str], None] | None,
    *,
    hashes: bool,
) -> None:
    first = configs[0]
    for config in configs:
        check_settings(config)
    begun = [find_unfinished(path) for path in record_paths]
    if all(there is not None and there.record.complete for there in begun):
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
            cell.data,
            environment,
            scoring_facts(cell, config),
        )
        for config, cell in zip(configs, cells, strict=True)
    ]
    for path, there, run in zip(record_paths, begun, runs, strict=True):
        if there is not None:
            check_same_run(path, there.record, run)
            if on_note:
                on_note(_resume_note(path, there, run))
    with contextlib.ExitStack() as stack:
        answering = (_ask_endpoint if first.endpoint else _ask_model)(cells, configs, environment)
        stack.callback(answering.close)
        records = [
            stack.enter_context(resume_record(path, run))
            for path, run in zip(record_paths, runs, strict=True)
        ]
        jobs = _find_jobs(cells, records)
        n_before = sum(len(record.answered) for record in records)
        if on_progress and n_before:
            on_progress(n_before, n_before + len(jobs))
        started = time.perf_counter()
        for done, (job, answer) in enumerate(answering.answer(jobs), start=1):
            c, i = jobs[job].tolist()
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
            record.finish(observed, len(cell.asked))


def _find_jobs(cells: Sequence[Preparation], records: Sequence[RecordWriter]) -> Jobs:
    """What is not answered yet, run by run in the data's order."""
    jobs = []
    for c, (cell, record) in enumerate(zip(cells, records, strict=True)):
        missing = np.setdiff1d(np.arange(len(cell.asked), dtype=np.int32), record.answered)
        jobs.append(np.stack([np.full_like(missing, c), missing], axis=1))
    return np.concatenate(jobs)


@dataclass(frozen=True, slots=True)
class Answering:
    """Where a run's answers come from: a model opened here, or an endpoint."""

    answer: Callable[[Jobs], Iterator[tuple[int, Answer | None]]]  # a job's number and answer
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
    first_s = _warm_up(readers[0], cells[0].asked, manifest.max_length, config.warmup)

    def observe() -> dict[str, Any]:
        seen = {"load_s": model.load_s, "first_call_s": first_s}
        return seen | {"disk_bytes": size_on_disk(manifest)} | peak_memory()

    def answer(jobs: Jobs) -> Iterator[tuple[int, Answer | None]]:
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

    def ask(c: int, i: int) -> Answer | None:
        cell, settings = cells[c], configs[c]
        request = cell.asked.request(i)
        if settings.scoring in TEXT_SCORING_METHODS:
            return endpoint.read_text(request, settings.max_new_tokens)
        letters = tuple(text for (text,) in cell.letters.pieces)
        return endpoint.read_letters(request, letters, settings.top_logprobs)

    started = time.perf_counter()
    ask(0, 0)
    first_s = time.perf_counter() - started

    def answer(jobs: Jobs) -> Iterator[tuple[int, Answer | None]]:
        waiting = SharedIterator(enumerate(jobs))
        sources = [((n, ask(*job)) for n, job in waiting) for _ in range(config.concurrency)]
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


def _resume_note(path: Path, there: Begun, here: RunRecord) -> str:
    unlike = other_environment(there.record, here)
    elsewhere = (
        f" It was begun with other {', '.join(unlike)}; both are recorded." if unlike else ""
    )
    return f"{path} goes on: {len(there.answered):,} answers are there already.{elsewhere}"


def _streams(config: RunConfig) -> dict[str, Any]:
    """Streams and threads a stream: one and all cores, or all cores and one (MLPerf's scenarios)."""
    if config.endpoint:
        return {"threads": None, "streams": config.concurrency}  # the server's, unknown
    cores = config.threads or usable_cores()
    streams, threads = (cores, 1) if config.scenario == "offline" else (1, cores)
    return {"threads": threads, "streams": streams}


def _answer(
    cells: Sequence[Preparation],
    readers: Sequence[Reader],
    jobs: Jobs,
    config: RunConfig,
    n_streams: int,
) -> Iterator[tuple[int, Answer | None]]:
    """Each job's index and answer as they come; None for a prompt that is too long."""
    n_tokens = np.concatenate(
        [cell.asked.n_tokens[jobs[jobs[:, 0] == c, 1]] for c, cell in enumerate(cells)]
    )
    fit = n_tokens <= cells[0].manifest.max_length
    fits = np.flatnonzero(fit)
    yield from ((int(job), None) for job in np.flatnonzero(~fit))

    def read(job: int) -> tuple[int, Answer]:
        c, i = jobs[job]
        return job, readers[c].read(cells[c].asked.input_ids(i))

    def read_sharing(steps: Sequence[Step]) -> Iterator[tuple[int, Answer]]:
        stack = PrefixStack(readers[0].model, BUDGET_BYTES // n_streams)
        for step in steps:
            job = int(fits[step.index])
            c, i = jobs[job]
            input_ids = cells[c].asked.input_ids(i)
            start = time.perf_counter()
            past, rest = stack.begin(input_ids, step)
            answer = readers[c].read(rest, past)
            # The beginning's time belongs to the question that needed it first.
            yield job, replace(answer, latency_s=time.perf_counter() - start)

    if config.reuse == "shared":
        steps = plan([cells[c].asked.token_ids(i) for c, i in jobs[fits]])
        yield from merge(read_sharing(part) for part in streams(steps, n_streams))
    elif n_streams == 1:
        yield from map(read, map(int, fits))
    else:
        # Longest first: the last to finish is then a short one.
        longest_first = fits[np.argsort(-n_tokens[fits], kind="stable")]
        waiting = SharedIterator(map(int, longest_first))
        yield from merge(map(read, waiting) for _ in range(n_streams))


def _warm_up(reader: Reader, asked: AskedPrompts, max_length: int, n: int) -> float | None:
    """Run prompts of the run's own lengths, shortest to longest; the first call's time."""
    by_length = np.argsort(asked.n_tokens, kind="stable")
    n_fitting = int((asked.n_tokens <= max_length).sum())
    first_s = None
    for step in range(min(n, n_fitting)):
        input_ids = asked.input_ids(by_length[(n_fitting - 1) * step // max(1, n - 1)])
        start = time.perf_counter()
        reader.read(input_ids)
        first_s = first_s or time.perf_counter() - start
    return first_s


def predict(
    prepared: Preparation, index: int, answer: Answer | None, config: RunConfig
) -> Prediction:
    """The option chosen from an answer, or why none was; ``answer`` None for a prompt too long."""
    asked, letters = prepared.asked[index], prepared.letters.letters
    values: tuple[float | None, ...] = (None,) * len(letters)
    decision, status = None, Status.TOO_LONG
    generated, matched = None, None
    if isinstance(answer, LetterLogits):
        values = tuple(float(v) if math.isfinite(v) else None for v in answer.values)
        scores = SCORING_METHODS[config.scoring](
            option_logits(values, asked.letters, letters), asked.letters
        )
        decision = decide(scores, partial=bool(config.endpoint))
    elif isinstance(answer, GeneratedText):
        decision = Decision(None, tied=False)
        if answer.text is not None:
            generated = bounded(answer.text)
            found = TEXT_SCORING_METHODS[config.scoring](generated, asked.letters)
            matched = found is not None
            drawn = draw_option(config.seed, asked.question_id, asked.rotation, len(asked.letters))
            decision = Decision(drawn if found is None else found, tied=False)
    if decision is not None and decision.predicted is not None:
        status = Status.SCORED
    elif decision is not None:
        status = Status.UNSEEN if config.endpoint else Status.INVALID
    return Prediction(
        question_id=asked.question_id,
        group=asked.group,
        subject=asked.subject,
        level=asked.level,
        country=asked.country,
        has_context=asked.has_context,
        negated=asked.negated,
        n_characters=asked.n_characters,
        letters=asked.letters,
        answer=asked.answer,
        predicted=decision.predicted if decision else None,
        tied=decision.tied if decision else False,
        letter_logits=values,
        n_tokens=answer.n_tokens if answer and answer.n_tokens else asked.n_tokens,
        latency_s=answer.latency_s if answer else None,
        status=status,
        n_shots=asked.n_shots,
        rotation=asked.rotation,
        index=index,
        generated=generated,
        matched=matched,
    )
