"""Prompt -> EncodedPrompt, and the token ids that spell each letter; the rule is letter_tokens().

Only the file tokenizer.json is read, with the special tokens its own post-processor adds, once.
A question's own text never becomes a control token: special tokens in it stay text.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import models

from edge_eval.errors import ModelError, ScoringError
from edge_eval.letters import describe_letter
from edge_eval.schema import EncodedPrompt, Int64Array, Prompt
from edge_eval.tokenizer_file import read_tokenizer

# Prompts handed to the tokenizer at once: enough for its threads, little in memory.
BATCH = 256


@dataclass(frozen=True, slots=True)
class LetterTokens:
    """How a model's vocabulary spells the letters after a prompt."""

    letters: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]  # per letter, one id or several to be taken in turn
    pieces: tuple[tuple[str, ...], ...]

    @property
    def single(self) -> bool:
        """Whether every letter is one token, so that one pass decides."""
        return all(len(ids) == 1 for ids in self.ids)


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory.

    Errors: ModelError when tokenizer.json is missing or cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} is missing: the prompts cannot be turned into token ids. Export the checkpoint "
            "again with `edge-eval export`."
        )
    with _panics_told(str(path)):
        try:
            tokenizer = read_tokenizer(path)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} is not a tokenizer: {reason}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextlib.contextmanager
def _panics_told(what: str) -> Iterator[None]:
    """A panic of the library, which no Exception is, as a ModelError: a damaged file's doing."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{what} makes the tokenizers library fail ({reason}): it is damaged. Export the model "
            "again."
        ) from error


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest token id the tokenizer can produce."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def control_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of the control tokens: ends of texts and turns, and what no text holds."""
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(token_id for token_id, token in added if token.special)


def encode_prompts(tokenizer: Any, prompts: Iterable[Prompt]) -> Iterator[EncodedPrompt]:
    """The prompts' token ids, special tokens as the tokenizer's own file says."""
    waiting = iter(prompts)
    while batch := list(islice(waiting, BATCH)):
        with _panics_told("this model's tokenizer.json"):
            encodings = tokenizer.encode_batch_fast([prompt.text for prompt in batch])
        for prompt, encoding in zip(batch, encodings, strict=True):
            yield EncodedPrompt(prompt.question_id, np.asarray(encoding.ids, dtype=np.int64))


def letter_tokens(
    tokenizer: Any, letters: Sequence[str], prefix: str = "", *, own_text: bool = False
) -> LetterTokens:
    """The ids that spell each letter behind a prompt, special tokens left out.

    The paper takes the last id of the letter encoded alone, which is the letter itself when
    the tokenizer puts a word-start piece before it; that piece is dropped here, and what is left
    is one id, the paper's, or several where the vocabulary has no token for the letter. With
    a prefix (" " for lm-eval) prefix and letter are encoded together and nothing is dropped.

    own_text: the answer is a text of its own, as an encoder-decoder's is, so that its word-start
    piece belongs to it and stays. There the paper takes the first id, which is the whole letter
    where the vocabulary has a token for it; where it has none, the first id is a word-start
    piece that says nothing of the letter, and several ids are returned instead.

    Source: mbzuai-nlp/ArabicMMLU, util_compute.py at 8d5b148.
    Errors: ScoringError for letters that are unknown or spelt alike.
    """
    unknown = tokenizer.token_to_id(_unknown_token(tokenizer) or "")
    ids, pieces = [], []
    for letter in letters:
        spelling = _spell(tokenizer, prefix, letter, own_text=own_text)
        while not (prefix or own_text) and len(spelling) > 1 and _is_blank(tokenizer, spelling[0]):
            spelling = spelling[1:]
        if not spelling or any(token_id == unknown for token_id, _piece in spelling):
            raise ScoringError(
                f"the letter {describe_letter(letter)} is unknown to this tokenizer, so its logit "
                "would mean nothing. Use the other alphabet (--letters)."
            )
        ids.append(tuple(token_id for token_id, _piece in spelling))
        pieces.append(tuple(piece for _id, piece in spelling))
    for index, spelling_ids in enumerate(ids):
        if spelling_ids in ids[:index]:
            twin = letters[ids.index(spelling_ids)]
            raise ScoringError(
                f"this tokenizer spells {describe_letter(letters[index])} and "
                f"{describe_letter(twin)} with the same tokens {list(spelling_ids)}, so they cannot "
                "be told apart. Use the other alphabet (--letters)."
            )
    return LetterTokens(tuple(letters), tuple(ids), tuple(pieces))


def letter_inside(tokenizer: Any, text: str, letter: str) -> tuple[int, ...]:
    """The ids of the tokens that hold the last ``letter`` of ``text``: what a shot shows."""
    start = text.rindex(letter)
    with _panics_told("this model's tokenizer.json"):
        encoding = tokenizer.encode(text, add_special_tokens=False)
    return tuple(
        token_id
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
        if begin < start + len(letter) and end > start
    )


def encode_chat(tokenizer: Any, text: str, content: Sequence[str]) -> Int64Array:
    """The ids (seq,) of a rendered chat, its control tokens read as such, none of its own added.

    content: the parts that came from questions. Where one of them spells a control token, it is
    encoded apart and stays text.
    """
    control = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    ids: list[int] = []
    rest = text
    for part in content:
        if any(token in part for token in control) and part in rest:
            before, rest = rest.split(part, 1)
            ids += _encode(tokenizer, before, control=True)
            ids += _encode(tokenizer, part, control=False)
    ids += _encode(tokenizer, rest, control=True)
    return np.asarray(ids, dtype=np.int64)


def _encode(tokenizer: Any, text: str, *, control: bool) -> list[int]:
    tokenizer.encode_special_tokens = not control
    try:
        with _panics_told("this model's tokenizer.json"):
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.encode_special_tokens = True
    return ids


def _spell(tokenizer: Any, prefix: str, letter: str, *, own_text: bool) -> list[tuple[int, str]]:
    """The ids and pieces of a letter alone, or with its prefix as they stand behind a cue."""
    # At a text's beginning some tokenizers put a space of their own before the prefix.
    cue = ":" if prefix and not own_text else ""
    with _panics_told("this model's tokenizer.json"):
        before = tokenizer.encode(cue, add_special_tokens=False).ids
        after = tokenizer.encode(cue + prefix + letter, add_special_tokens=False)
    n = len(before) if after.ids[: len(before)] == before else 0
    return list(zip(after.ids[n:], after.tokens[n:], strict=True))


def _is_blank(tokenizer: Any, spelling: tuple[int, str]) -> bool:
    """Whether a token is a word-start mark alone, without any part of the letter."""
    token_id, piece = spelling
    return piece in {"\u2581", "\u0120"} or not tokenizer.decode([token_id]).strip()


def _unknown_token(tokenizer: Any) -> str | None:
    unknown = getattr(tokenizer.model, "unk_token", None)
    if isinstance(unknown, str) or not isinstance(tokenizer.model, models.Unigram):
        return unknown
    # A Unigram model names its unknown token only in its serialised form, which takes seconds.
    unk_id = json.loads(tokenizer.to_str())["model"].get("unk_id")
    return tokenizer.id_to_token(unk_id) if unk_id is not None else None
