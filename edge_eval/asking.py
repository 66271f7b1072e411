"""Questions -> the prompts of a run as token ids (or an endpoint's requests), their texts let go.

A run holds every prompt from its beginning to its end, since nothing may fail half-way and the
tokenizer goes before the model comes. So what is held of each is small: see AskedPrompts.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_eval.chat import ChatTemplate
from edge_eval.errors import DataError, ScoringError
from edge_eval.letters import describe_letter
from edge_eval.metrics import is_negated
from edge_eval.prompts import render, rotate, shot_text, wording_of
from edge_eval.run_record import to_json
from edge_eval.schema import EncodedPrompt, Int64Array, Prompt, Question, QuestionSet, RunConfig
from edge_eval.tokenization import BATCH, encode_chat, encode_prompts, letter_inside, letter_tokens

Asking = tuple[Question, int]  # a question, and by how many places its options are moved up


@dataclass(frozen=True, slots=True)
class Asked:
    """All that is recorded of a prompt and its question beside the answer."""

    question_id: str
    group: str
    subject: str
    level: str
    country: str
    has_context: bool
    negated: bool
    n_characters: int
    letters: tuple[str, ...]
    answer: int  # among the options as they were shown
    n_tokens: int  # 0 where an endpoint has the tokenizer
    n_shots: int
    rotation: int


class Rows:
    """Rows of numbers, each as long as it is, end to end in one array."""

    def __init__(self, typecode: str) -> None:
        self._numbers = array(typecode)
        self._ends = array("q", [0])

    def append(self, row: bytes) -> None:
        """Add a row, given as its numbers' bytes."""
        self._numbers.frombytes(row)
        self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """A row (its length,), not copied."""
        return self.numbers[self._ends[index] : self._ends[index + 1]]

    @property
    def numbers(self) -> npt.NDArray[Any]:
        """All rows', not copied; no row can be added as long as this is held."""
        return np.frombuffer(self._numbers, dtype=self._numbers.typecode)

    @property
    def lengths(self) -> Int64Array:
        ends = np.frombuffer(self._ends, dtype=np.int64)
        return ends[1:] - ends[:-1]


FACTS = np.dtype(
    [
        ("kind", np.uint16),  # which group, subject, level and country: some hundreds at most
        ("has_context", np.bool_),
        ("negated", np.bool_),
        ("n_characters", np.int32),
        ("n_options", np.uint8),
        ("answer", np.uint8),
        ("rotation", np.uint8),
        ("n_shots", np.int32),
    ]
)


class AskedPrompts:
    """A run's prompts in order, without texts: some 40 bytes each and 4 a token.

    Of a run against an endpoint the requests are held instead of tokens.
    """

    def __init__(self, letters: tuple[str, ...], *, requests: bool = False) -> None:
        self._letters = letters
        self._facts = bytearray()  # of FACTS
        self._kinds: dict[tuple[str, str, str, str], int] = {}
        self._ids = Rows("B")
        self._contents = Rows("B" if requests else "I")
        self._has_tokens = not requests
        self._sha256 = hashlib.sha256()

    def add(self, question: Question, prompt: Prompt, content: Int64Array | bytes) -> None:
        """Keep a prompt's token ids or its request, and what is recorded of its question."""
        kind = (question.group, question.subject, question.level, question.country)
        facts = (
            self._kinds.setdefault(kind, len(self._kinds)),
            bool(question.context),
            is_negated(question.text),
            len(question.context) + len(question.text),
            len(prompt.letters),
            rotate(question, prompt.rotation).answer,
            prompt.rotation,
            prompt.n_shots,
        )
        self._facts += np.array(facts, dtype=FACTS).tobytes()
        self._sha256.update(f"{question.id!r} {prompt.rotation} {len(content)}\n".encode())
        self._sha256.update(
            content if isinstance(content, bytes) else content.astype("<i8").tobytes()
        )
        self._ids.append(question.id.encode())
        self._contents.append(
            content if isinstance(content, bytes) else content.astype(np.uintc).tobytes()
        )

    @property
    def sha256(self) -> str:
        """Hash of the questions' ids with their prompts' tokens or requests, in order."""
        return self._sha256.hexdigest()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Asked:
        row = np.frombuffer(self._facts, dtype=FACTS)[index].item()
        facts: dict[str, Any] = dict(zip(FACTS.names or (), row, strict=True))
        group, subject, level, country = list(self._kinds)[facts.pop("kind")]
        return Asked(
            question_id=self._ids[index].tobytes().decode(),
            group=group,
            subject=subject,
            level=level,
            country=country,
            letters=self._letters[: facts.pop("n_options")],
            n_tokens=len(self._contents[index]) if self._has_tokens else 0,
            **facts,
        )

    def token_ids(self, index: int) -> npt.NDArray[np.uintc]:
        """A prompt's token ids (seq,), not copied."""
        return self._contents[index]

    def input_ids(self, index: int) -> Int64Array:
        """A prompt's token ids (seq,) as a model takes them."""
        return self._contents[index].astype(np.int64)

    def request(self, index: int) -> Mapping[str, Any]:
        """What an endpoint is sent: the text, or the messages of a chat."""
        found: dict[str, Any] = json.loads(self._contents[index].tobytes())
        return found

    @property
    def n_tokens(self) -> Int64Array:
        """Every prompt's tokens (prompts,)."""
        return self._contents.lengths

    def largest_token_id(self) -> int:
        return int(self._contents.numbers.max(initial=0))

    def n_with_fewer_shots(self, n_shots: int) -> int:
        return int((np.frombuffer(self._facts, dtype=FACTS)["n_shots"] < n_shots).sum())


class Asker:
    """Questions -> prompts and token ids, under one run's settings."""

    def __init__(
        self,
        config: RunConfig,
        questions: QuestionSet,
        tokenizer: Any,
        chat: ChatTemplate | None,
        max_length: int,
        *,
        own_text: bool = False,
    ) -> None:
        self._config = config
        self._questions = questions
        self._tokenizer = tokenizer
        self._chat = chat
        self._max_length = max_length
        self._space_with_letter = False
        # An encoder-decoder's answer is a text of its own: no cue's space stands before its letter.
        if config.shots and chat is None and tokenizer is not None and not own_text:
            self._space_with_letter = self._choose_letter_form()
        self.wording = wording_of(config.template, space_with_letter=self._space_with_letter)
        if chat is not None or config.chat_template == "server":
            # Behind the assistant's header the answer begins: no separator of our own.
            self.wording = replace(self.wording, letter_prefix="")

    def ask_all(self) -> AskedPrompts:
        """Every prompt's token ids, the texts let go batch by batch."""
        asked = AskedPrompts(self.wording.letters)
        for question, prompt, encoded in self.prompts():
            asked.add(question, prompt, encoded.input_ids)
        return asked

    def request_all(self) -> AskedPrompts:
        """Every prompt as an endpoint is sent it: the text, or the messages of a chat."""
        is_chat = self._config.chat_template == "server"
        system = self._config.system_prompt
        asked = AskedPrompts(self.wording.letters, requests=True)
        for question, rotation in self._askings():
            shots = self._shots(question)
            prompt = self._render(question, () if is_chat else shots, rotation)
            messages = [{"role": "system", "content": system}] if system else []
            for shown, letter in self._turns(shots):
                messages.append({"role": "user", "content": shown})
                messages.append({"role": "assistant", "content": letter})
            messages.append({"role": "user", "content": prompt.text})
            request = {"messages": messages} if is_chat else {"prompt": prompt.text}
            asked.add(question, replace(prompt, n_shots=len(shots)), to_json(request).encode())
        return asked

    def prompts(self) -> Iterator[tuple[Question, Prompt, EncodedPrompt]]:
        """Every prompt with its ids; one that is too long loses its shots one by one."""
        waiting = self._askings()
        while batch := list(islice(waiting, BATCH)):
            rendered = [self._render(q, self._shots(q), rotation) for q, rotation in batch]
            for asking, prompt, encoded in zip(
                batch, rendered, self._encode(rendered, batch), strict=True
            ):
                yield asking[0], *self._shorten(asking, prompt, encoded)

    def _askings(self) -> Iterator[Asking]:
        """Every question with the rotations in which it is asked."""
        for question in self._questions.test:
            for rotation in range(len(question.options) if self._config.permute else 1):
                yield question, rotation

    def _shorten(
        self, asking: Asking, prompt: Prompt, encoded: EncodedPrompt
    ) -> tuple[Prompt, EncodedPrompt]:
        question, rotation = asking
        while len(encoded.input_ids) > self._max_length and prompt.n_shots:
            shots = self._shots(question)[: prompt.n_shots - 1]
            prompt = self._render(question, shots, rotation)
            (encoded,) = self._encode([prompt], [asking])
        return prompt, encoded

    def _turns(self, shots: Sequence[Question]) -> list[tuple[str, str]]:
        return [(self.wording.write(shot), self.wording.letters[shot.answer]) for shot in shots]

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
        text = self._chat.render(self._turns(shots), prompt.text, self._config.system_prompt)
        return replace(prompt, text=text, n_shots=len(shots))

    def _encode(self, prompts: Sequence[Prompt], asked: Sequence[Asking]) -> list[EncodedPrompt]:
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
