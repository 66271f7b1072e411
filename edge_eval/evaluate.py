"""RunConfig -> RunRecord: the whole evaluation, one readable loop.

Everything that can fail without the model (questions, lengths, letters) fails before it is
loaded; the tokenizer is let go before that too, since both together would be the run's peak.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_eval import metrics
from edge_eval.chat import ChatTemplate, has_chat_template, load_chat_template
from edge_eval.environment import (
    describe_machine,
    peak_memory,
    release_memory,
    usable_cores,
)
from edge_eval.errors import DataError, ModelError, OptionError, RecordError, ScoringError
from edge_eval.letters import ARABIC, LATIN, describe_letter
from edge_eval.model import LetterReader, letter_reader, open_model
from edge_eval.model_dir import GRAPH, read_manifest, size_on_disk, verify_hashes
from edge_eval.prefixes import BUDGET_BYTES, PrefixStack, Step, plan, streams
from edge_eval.prompts import PromptTemplate, render, rotate, shot_text, wording_of
from edge_eval.questions import fingerprint_questions, load_questions
from edge_eval.run_record import (
    check_same_run,
    find_unfinished,
    new_record,
    other_environment,
    read_record,
    resume_record,
)
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
from edge_eval.scoring import PROTOCOLS, SCORING_METHODS, decide, option_logits
from edge_eval.streams import SharedIterator, merge
from edge_eval.tokenization import (
    LetterTokens,
    encode_chat,
    encode_prompts,
    letter_inside,
    letter_tokens,
    load_tokenizer,
    vocabulary_size,
)

Progress = Callable[[int, int], None]  # prompts done, prompts in all

# What Python, numpy and onnxruntime take without a model.
OWN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Preparation:
    """All of a run that needs no forward pass."""

    manifest: ExportManifest
    questions: QuestionSet
    asked: tuple[Question, ...]  # one per prompt: a question stands once per rotation
    prompts: tuple[Prompt, ...]
    encoded: tuple[EncodedPrompt, ...]
    letters: LetterTokens  # the ten measured, in the order of letter_logits
    notes: tuple[str, ...]
    chat_template_sha256: str | None


def prepare(config: RunConfig, *, hashes: bool = True) -> Preparation:
    """Read the questions, render and tokenise every prompt, find the letters' ids.

    Errors: DataError, ModelError, ScoringError, each before the model is loaded.
    """
    directory = Path(config.model)
    manifest = read_manifest(directory)
    if hashes:
        verify_hashes(directory, manifest)
    questions = load_questions(config)
    tokenizer = load_tokenizer(directory)
    chat = load_chat_template(config.chat_template, directory)
    asker = Asker(config, questions, tokenizer, chat, manifest.max_length)
    asked = [
        (question, rotation)
        for question in questions.test
        for rotation in range(len(question.options) if config.permute else 1)
    ]
    prompts, encoded = asker.ask_all(asked)
    letters = ten_letters(tokenizer, asker.wording)
    check_vocabulary(directory, manifest, encoded, vocabulary_size(tokenizer))
    if all(len(item.input_ids) > manifest.max_length for item in encoded):
        raise DataError(
            f"every prompt is longer than the {manifest.max_length} tokens that {manifest.name} "
            "can take: nothing can be scored."
        )
    return Preparation(
        manifest,
        questions,
        tuple(question for question, _ in asked),
        tuple(prompts),
        tuple(encoded),
        letters,
        tuple(_notes(config, directory, letters, prompts)),
        chat.sha256 if chat else None,
    )


def _notes(
    config: RunConfig, directory: Path, letters: LetterTokens, prompts: Sequence[Prompt]
) -> list[str]:
    """What a user should know about this run before it begins."""
    notes = []
    if config.chat_template == "off" and has_chat_template(directory):
        notes.append(
            "this model carries a chat template and the run does not use it (--chat-template auto "
            "does); the paper scores without."
        )
    if config.shots and has_chat_template(directory):
        notes.append("models tuned for chat tend to lose by shots, base models to gain (paper).")
    several = [
        describe_letter(letter)
        for letter, ids in zip(letters.letters, letters.ids, strict=True)
        if len(ids) > 1
    ]
    if several:
        notes.append(f"scored in several steps, having no token of their own: {', '.join(several)}")
    fewer = sum(prompt.n_shots < config.shots for prompt in prompts)
    if fewer:
        notes.append(f"{fewer:,} prompts have fewer than {config.shots} shots.")
    return notes


class Asker:
    """Questions -> prompts and token ids, under one run's settings."""

    def __init__(
        self,
        config: RunConfig,
        questions: QuestionSet,
        tokenizer: Any,
        chat: ChatTemplate | None,
        max_length: int,
    ) -> None:
        self._config = config
        self._questions = questions
        self._tokenizer = tokenizer
        self._chat = chat
        self._max_length = max_length
        self._space_with_letter = False
        if config.shots and chat is None:
            self._space_with_letter = self._choose_letter_form()
        self.wording = wording_of(config.template, space_with_letter=self._space_with_letter)
        if chat is not None:
            # Behind the assistant's header the answer begins: no separator of our own.
            self.wording = replace(self.wording, letter_prefix="")

    def ask_all(
        self, asked: Sequence[tuple[Question, int]]
    ) -> tuple[list[Prompt], list[EncodedPrompt]]:
        """Every prompt with its ids; a prompt that is too long loses its shots one by one."""
        prompts = [self._render(q, self._shots(q), rotation) for q, rotation in asked]
        encoded = self._encode(prompts, asked)
        for index, (question, rotation) in enumerate(asked):
            while len(encoded[index].input_ids) > self._max_length and prompts[index].n_shots:
                shots = self._shots(question)[: prompts[index].n_shots - 1]
                prompts[index] = self._render(question, shots, rotation)
                encoded[index] = self._encode([prompts[index]], [(question, rotation)])[0]
        return prompts, encoded

    def _shots(self, question: Question) -> tuple[Question, ...]:
        """The question's task's first few-shot rows, itself never among them.

        Errors: DataError when the task has fewer than asked and that was not allowed.
        """
        rows = [
            shot
            for shot in self._questions.shots.get(question.task, ())
            if (shot.context, shot.text, shot.options)
            != (question.context, question.text, question.options)
        ]
        if len(rows) < self._config.shots and not self._config.allow_fewer_shots:
            raise DataError(
                f"{question.task} has {len(rows)} few-shot rows for question {question.id} and "
                f"{self._config.shots} were asked for. Ask for fewer with --shots, or let tasks have "
                "what they have with --allow-fewer-shots."
            )
        return tuple(rows[: self._config.shots])

    def _render(self, question: Question, shots: Sequence[Question], rotation: int) -> Prompt:
        prompt = render(
            question,
            self._config.template,
            () if self._chat else shots,
            space_with_letter=self._space_with_letter,
            rotation=rotation,
        )
        if self._chat is None:
            return prompt
        turns = [(self.wording.write(shot), self.wording.letters[shot.answer]) for shot in shots]
        text = self._chat.render(turns, prompt.text, self._config.system_prompt)
        return replace(prompt, text=text, n_shots=len(shots))

    def _encode(
        self, prompts: Sequence[Prompt], asked: Sequence[tuple[Question, int]]
    ) -> list[EncodedPrompt]:
        if self._chat is None:
            return list(encode_prompts(self._tokenizer, prompts))
        return [
            EncodedPrompt(
                prompt.question_id,
                encode_chat(self._tokenizer, prompt.text, self._parts(prompt, q)),
            )
            for prompt, (q, _) in zip(prompts, asked, strict=True)
        ]

    def _parts(self, prompt: Prompt, question: Question) -> list[str]:
        """The questions' own texts in a chat, shots first, in the order they stand there."""
        shown = [*self._shots(question)[: prompt.n_shots], rotate(question, prompt.rotation)]
        return [part for q in shown for part in (q.context, q.text, *q.options)]

    def _choose_letter_form(self) -> bool:
        """Whether the cue's last space must go with the letter, so that shots show what is scored.

        Errors: ScoringError when the shots' letters are other tokens either way.
        """
        shot = next((rows[0] for rows in self._questions.shots.values() if rows), None)
        if shot is None:
            return False
        for space_with_letter in (False, True):
            wording = wording_of(self._config.template, space_with_letter=space_with_letter)
            scored = letter_tokens(self._tokenizer, wording.letters[:1], wording.letter_prefix)
            text = shot_text(replace(shot, answer=0), wording) + "\n\n"
            shown = wording.letter_prefix + wording.letters[0]
            if letter_inside(self._tokenizer, text, shown) == scored.ids[0]:
                return space_with_letter
        raise ScoringError(
            f"inside a shot this tokenizer reads {describe_letter(wording.letters[0])} as other "
            "tokens than behind the last cue, so shots would teach letters that are not scored. "
            "Run without --shots."
        )


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
    cells = [prepare(config, hashes=hashes and config is first) for config in configs]
    if on_note:
        for note in dict.fromkeys(note for cell in cells for note in cell.notes):
            on_note(note)
    n_streams, threads = _cores(first)
    environment = describe_machine() | {"threads": threads, "streams": n_streams}
    runs = [
        new_record(
            config,
            cell.manifest,
            cell.questions.fingerprint,
            environment,
            _scoring_facts(cell, config),
        )
        for config, cell in zip(configs, cells, strict=True)
    ]
    for path, there, run in zip(record_paths, begun, runs, strict=True):
        if there is not None:
            check_same_run(path, there, run)
            if on_note:
                on_note(_resume_note(path, there, run))
    check_memory(cells[0].manifest, environment)
    release_memory()
    model = open_model(Path(first.model), cells[0].manifest, threads)
    readers = [
        letter_reader(model, cell.letters.ids, normalized=PROTOCOLS[config.protocol].normalized)
        for cell, config in zip(cells, configs, strict=True)
    ]
    first_s = _warm_up(readers[0], _fitting(cells[0]), first.warmup)
    with contextlib.ExitStack() as stack:
        records = [
            stack.enter_context(resume_record(path, run))
            for path, run in zip(record_paths, runs, strict=True)
        ]
        # A list of pairs: which run, which of its prompts.
        jobs = [
            (c, i)
            for c, cell in enumerate(cells)
            for i in range(len(cell.encoded))
            if i not in records[c].answered
        ]
        n_before = sum(len(record.answered) for record in records)
        if on_progress and n_before:
            on_progress(n_before, n_before + len(jobs))
        started = time.perf_counter()
        answers = _answer(cells, readers, jobs, first, n_streams)
        for done, (job, logits) in enumerate(answers, start=1):
            c, i = jobs[job]
            records[c].append(predict(cells[c], i, logits, configs[c]))
            if on_progress:
                on_progress(n_before + done, n_before + len(jobs))
        observed = {
            # Of all the runs together: none of them ran alone.
            "wall_s": time.perf_counter() - started,
            "n_prompts_together": len(jobs),
            "load_s": model.load_s,
            "first_call_s": first_s,
            "disk_bytes": size_on_disk(cells[0].manifest),
            **peak_memory(),
        }
        for record, cell in zip(records, cells, strict=True):
            record.finish(observed, len(cell.encoded))
    return [read_record(path) for path in record_paths]


def _resume_note(path: Path, there: RunRecord, here: RunRecord) -> str:
    unlike = other_environment(there, here)
    elsewhere = (
        f" It was begun with other {', '.join(unlike)}; both are recorded." if unlike else ""
    )
    return f"{path} goes on: {len(there.predictions):,} answers are there already.{elsewhere}"


def check_memory(manifest: ExportManifest, environment: Mapping[str, Any]) -> None:
    """Raise ModelError when the graph cannot be held in this process's memory.

    The head and the embedding are not counted: they are mapped, and only the rows used are read.
    """
    sizes = [int(v["size_bytes"]) for name, v in manifest.files.items() if name.startswith(GRAPH)]
    needed = sum(sizes) + OWN_MEMORY_BYTES
    limits = [environment[name] for name in ("memory_limit_bytes", "memory_total_bytes")]
    limit = min(n for n in limits if n is not None)
    if needed > limit:
        raise ModelError(
            f"{manifest.name} needs {needed / 1e6:,.0f} MB of memory at least, and this process "
            f"may have {limit / 1e6:,.0f} MB: raise the limit, or take a lower precision "
            "(edge-eval quantize)."
        )


def _scoring_facts(cell: Preparation, config: RunConfig) -> dict[str, Any]:
    """What decides the answers beside the config: read back, it tells whether a run is the same."""
    shots = [shot for rows in cell.questions.shots.values() for shot in rows[: config.shots]]
    several = any(len(ids) > 1 for ids in cell.letters.ids)
    prompts = hashlib.sha256()
    for prompt, item in zip(cell.prompts, cell.encoded, strict=True):
        prompts.update(f"{prompt.question_id!r} {prompt.rotation} {len(item.input_ids)}\n".encode())
        prompts.update(item.input_ids.astype("<i8").tobytes())
    return {
        "shots_sha256": fingerprint_questions(shots) if config.shots else None,
        "chat_template_sha256": cell.chat_template_sha256,
        "prompts_sha256": prompts.hexdigest(),  # ids of questions and tokens, in order
        "letters": cell.letters.letters,
        "letter_ids": cell.letters.ids,
        "letter_pieces": cell.letters.pieces,
        "normalized": PROTOCOLS[config.protocol].normalized or several,
    }


def check_settings(config: RunConfig) -> None:
    """Raise OptionError for settings that contradict each other."""
    protocol = PROTOCOLS.get(config.protocol)
    if protocol is None:
        raise OptionError(f"no protocol {config.protocol!r}: there are {', '.join(PROTOCOLS)}.")
    for name in ("prompt", "letters"):
        fixed, asked = getattr(protocol, name), getattr(config, name)
        if fixed is not None and fixed != asked:
            raise OptionError(
                f"protocol {config.protocol} has {name} {fixed}, and {asked} was asked for: leave "
                f"--{name} out, or take --protocol paper."
            )
    if config.system_prompt and config.chat_template == "off":
        raise OptionError("a system prompt needs a chat template: add --chat-template auto.")


def _cores(config: RunConfig) -> tuple[int, int]:
    """Streams and threads a stream: one and all cores, or all cores and one (MLPerf's scenarios)."""
    cores = config.threads or usable_cores()
    return (cores, 1) if config.scenario == "offline" else (1, cores)


def _fitting(prepared: Preparation) -> list[EncodedPrompt]:
    limit = prepared.manifest.max_length
    return [item for item in prepared.encoded if len(item.input_ids) <= limit]


def _answer(
    cells: Sequence[Preparation],
    readers: Sequence[LetterReader],
    jobs: Sequence[tuple[int, int]],
    config: RunConfig,
    n_streams: int,
) -> Iterator[tuple[int, LetterLogits | None]]:
    """Each job's index and logits as they come; None for a prompt that is too long."""
    encoded = [cells[c].encoded[i] for c, i in jobs]
    limit = cells[0].manifest.max_length
    fits = [job for job, item in enumerate(encoded) if len(item.input_ids) <= limit]
    yield from ((job, None) for job in sorted(set(range(len(jobs))) - set(fits)))

    def read(job: int) -> tuple[int, LetterLogits]:
        return job, readers[jobs[job][0]].read(encoded[job].input_ids)

    def read_sharing(steps: Sequence[Step]) -> Iterator[tuple[int, LetterLogits]]:
        stack = PrefixStack(readers[0].model, BUDGET_BYTES // n_streams)
        for step in steps:
            job = fits[step.index]
            start = time.perf_counter()
            past, rest = stack.begin(encoded[job].input_ids, step)
            logits = readers[jobs[job][0]].read(rest, past)
            # The beginning's time belongs to the question that needed it first.
            yield job, replace(logits, latency_s=time.perf_counter() - start)

    if config.reuse == "shared":
        steps = plan([encoded[job] for job in fits])
        yield from merge(read_sharing(part) for part in streams(steps, n_streams))
    elif n_streams == 1:
        yield from map(read, fits)
    else:
        # Longest first: the last to finish is then a short one.
        waiting = SharedIterator(sorted(fits, key=lambda job: -len(encoded[job].input_ids)))
        yield from merge(map(read, waiting) for _ in range(n_streams))


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
    prepared: Preparation, index: int, logits: LetterLogits | None, config: RunConfig
) -> Prediction:
    """The option chosen from the logits, or why none was; ``logits`` None for a prompt too long."""
    prompt, letters = prepared.prompts[index], prepared.letters.letters
    question = rotate(prepared.asked[index], prompt.rotation)
    values: tuple[float | None, ...] = (None,) * len(letters)
    decision, status = None, Status.TOO_LONG
    if logits is not None:
        values = tuple(float(v) if math.isfinite(v) else None for v in logits.values)
        scores = SCORING_METHODS[config.scoring](
            option_logits(values, prompt.letters, letters), prompt.letters
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
        n_tokens=len(prepared.encoded[index].input_ids),
        latency_s=logits.latency_s if logits else None,
        status=status,
        n_shots=prompt.n_shots,
        rotation=prompt.rotation,
        index=index,
    )
