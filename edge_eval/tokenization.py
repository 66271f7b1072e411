"""Prompt -> EncodedPrompt, and the token ids that spell each letter; the rule is letter_tokens().

Only the file tokenizer.json is read, with the special tokens its own post-processor adds, once.
A question's own text never becomes a control token: special tokens in it stay text.
"""

import base64
import contextlib
import json
import math
import mmap
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# How a stranger's tokenizer.json may change a text: far above what published ones do (T5's makes it
# 66 times as long at the very most). The library itself has no limits.
MAX_STEPS = 200
MAX_GROWTH = 1024
MAX_ADDED = 4096  # characters or tokens, to every text
# A text of 1,000 characters takes a millisecond. Regular expressions can take for ever.
PROBE = (
    "ما معنى الكلمة التي تحتها خط في الجملة السابقة من الكتاب؟ What does the word below mean here "
    "\nA. aaaaaaaaaaaaaaaaaaaaaaaaaa\nب) ١٢٣ - (س + 1,000.25) .....!!   \n\n"
)
PROBE_LENGTHS = (8, 32, 128, 512)
PROBE_LIMIT_S = 5.0

# Reading the file takes time by the square of these; Gemma's has 6,400 texts of up to 31 bytes.
MAX_TEXTS = 50_000
MAX_TEXT_BYTES = 2048


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

    Errors: ModelError when tokenizer.json is missing, cannot be read, or would draw by chance, or
    make texts so long or take so long that the machine is not one's own any more.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} is missing: the prompts cannot be turned into token ids. Export the checkpoint "
            "again with `edge-eval export`."
        )
    check_tokenizer_file(path)
    with _panics_told(str(path)):
        try:
            tokenizer = read_tokenizer(path)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} is not a tokenizer: {reason}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    _check_steps(tokenizer, path)
    _check_speed(tokenizer, path)
    return tokenizer


def _any_spelling(name: str) -> bytes:
    """A pattern of a name in JSON, where every character may be written by its number."""
    return b"".join(rb"(?:%c|\\u00(?i:%02x))" % (code, code) for code in name.encode())


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_TEXTS = re.compile(
    rb'"(?:(?P<text>%b)|%b)"\s*:\s*(?=")'
    % (_any_spelling("content"), _any_spelling("precompiled_charsmap"))
)


def check_tokenizer_file(path: Path) -> None:
    """Raise ModelError for what the library would take gigabytes or hours to read.

    Found without reading the file as JSON, which takes more time and memory than the tokenizer.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    with file:
        if not path.stat().st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            n_texts = 0
            for key in _TEXTS.finditer(raw):
                value = _STRING.match(raw, key.end())
                if value is None:
                    return  # no JSON, as the library will say
                length = value.end() - value.start()
                n_texts += key["text"] is not None
                if key["text"] is None and not _is_whole_table(value[0]):
                    raise ModelError(
                        f"{path} is damaged: its table of normal forms (precompiled_charsmap) is not "
                        "as long as it says. Export the model again."
                    )
                if n_texts > MAX_TEXTS or (key["text"] and length > MAX_TEXT_BYTES):
                    raise ModelError(
                        f"{path} has more than {MAX_TEXTS:,} added tokens, or one of more than "
                        f"{MAX_TEXT_BYTES:,} bytes, as no published tokenizer does. Do not trust "
                        "this model."
                    )


def _is_whole_table(quoted: bytes) -> bool:
    """Whether a sentencepiece table, in base64 in JSON, is as long as its first number says."""
    try:
        table = base64.b64decode(json.loads(quoted))
    except ValueError:
        return False
    return int.from_bytes(table[:4], "little") <= len(table) - 4


def _check_steps(tokenizer: Any, path: Path) -> None:
    """Raise ModelError for steps that lengthen a text without bounds, or draw by chance.

    A replacement that doubles spaces, forty times over, makes a terabyte of one space.
    """
    if getattr(tokenizer.model, "dropout", None):
        raise ModelError(
            f"{path} draws its tokens by chance (a dropout of {tokenizer.model.dropout:.2g}, meant "
            "for training): no run could be repeated. Set its dropout to null."
        )
    before = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
    behind = _steps(tokenizer.post_processor)
    written = _steps(tokenizer.decoder)
    n_added = sum(len(step.get("prepend", "")) for step in before)
    # Several templates, one after the other, each repeat what the one before them made.
    n_added += sum(len(_template(step)) for step in behind)
    n_added += tokenizer.num_special_tokens_to_add(is_pair=False)
    growth = max(
        math.prod(map(_growth, before)) * math.prod(map(_repeats, behind)),
        math.prod(map(_growth, written)),
    )
    if len(before) + len(behind) + len(written) > MAX_STEPS:
        problem = f"takes over {MAX_STEPS} steps to read a text"
    elif growth > MAX_GROWTH:
        problem = f"may make a text over {MAX_GROWTH:,} times as long"
    elif n_added > MAX_ADDED:
        problem = f"adds over {MAX_ADDED:,} characters and tokens to every text"
    else:
        return
    raise ModelError(f"{path} {problem}, as no published tokenizer does. Do not trust this model.")


def _steps(component: Any) -> list[Mapping[str, Any]]:
    """What a normalizer, pre-tokenizer, post-processor or decoder does, one after the other."""

    def walk(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if step["type"] != "Sequence":
            yield step
            return
        for inner in step.values():
            if isinstance(inner, list):
                for part in inner:
                    yield from walk(part)

    return [] if component is None else list(walk(json.loads(component.__getstate__())))


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long a step can make a text: an upper bound, in characters.

    Unicode's own normal forms count as 1: they change nothing when done again.
    """
    if step["type"] == "Replace":
        length = len(step["content"])
        pattern = step["pattern"].get("String", "")
        # An expression may match one character, or the nothing between two.
        return max(1.0, length / len(pattern)) if pattern else 1.0 + length
    if step["type"] == "ByteLevel":
        return 2.0  # a byte above 127 is written as a character of two bytes
    if step["type"] == "Precompiled":
        # The length of a trie, the trie, and all replacements, a zero behind each.
        table = base64.b64decode(step["precompiled_charsmap"])
        replacements = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1.0, *map(len, replacements))
    return 1.0


def _template(step: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    template: Sequence[Mapping[str, Any]] = step.get("single", ())
    return template


def _repeats(step: Mapping[str, Any]) -> float:
    """How often a post-processor's result holds the text."""
    return float(max(1, sum("Sequence" in piece for piece in _template(step))))


def _check_speed(tokenizer: Any, path: Path) -> None:
    """Raise ModelError when short texts take long: each is tried only if a shorter one did not."""
    for length in PROBE_LENGTHS:
        start = time.monotonic()
        with _panics_told(str(path)):
            tokenizer.encode((PROBE * length)[:length])
        if time.monotonic() - start > PROBE_LIMIT_S:
            raise ModelError(
                f"{path} takes over {PROBE_LIMIT_S:.0f} s to read {length} characters, as no "
                "published tokenizer does. Do not trust this model."
            )


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
