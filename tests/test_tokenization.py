"""Prompts become the ids the model was trained on, and letters the ids it would answer with."""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import edge_eval.tokenization as tokenization_module
from edge_eval.errors import ModelError, ScoringError
from edge_eval.letters import ARABIC, LATIN
from edge_eval.schema import Prompt
from edge_eval.tokenization import (
    BATCH,
    encode_chat,
    encode_prompts,
    letter_inside,
    letter_tokens,
    load_tokenizer,
    vocabulary_size,
)

BOS, EOS = 0, 1  # of the tests' byte-level vocabulary
SPACE = "\u2581"
UNKNOWN = "<unk>"
CHARACTERS = [UNKNOWN, "<s>", "</s>", SPACE, *"Answer:BCDE", *ARABIC]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def tokenizer_file(
    write_tokenizer: Callable[[Path], int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def byte_level(tokenizer_file: Path) -> Any:
    """One token a letter, in both alphabets."""
    return load_tokenizer(tokenizer_file.parent)


@pytest.fixture
def bytes_only(tokenizer_file: Path, tmp_path: Path) -> Any:
    """The same vocabulary without merges: an Arabic letter is two tokens."""
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    contents["model"]["merges"] = []
    return load(tmp_path, json.dumps(contents))


def load(folder: Path, contents: str) -> Any:
    (folder / "tokenizer.json").write_text(contents, encoding="utf-8")
    return load_tokenizer(folder)


def sentencepiece(
    folder: Path, spaces: str = "always", *, whole: bool = False, bytes_too: bool = False
) -> Any:
    """A vocabulary of characters in SentencePiece's manner, the word-start piece one of its own.

    whole: whether a Latin letter with its word-start mark is a piece too.
    """
    pieces = [piece for piece in CHARACTERS if not bytes_too or piece not in ARABIC]
    merges = [(SPACE, letter) for letter in LATIN] if whole else []
    pieces += [mark + letter for mark, letter in merges] + (BYTES if bytes_too else [])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=bytes_too)
    )
    tokenizer.add_special_tokens([UNKNOWN, "<s>", "</s>"])
    if spaces == "normalizer":
        marks = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        tokenizer.normalizer = normalizers.Sequence(marks)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return load(folder, tokenizer.to_str())


def encode(tokenizer: Any, *texts: str) -> list[list[int]]:
    prompts = [Prompt(str(index), text, LATIN) for index, text in enumerate(texts)]
    return [item.input_ids.tolist() for item in encode_prompts(tokenizer, prompts)]


# ---- prompts


def test_a_prompt_begins_with_one_bos_as_the_file_says(byte_level: Any) -> None:
    [ids] = encode(byte_level, "This is a question. Answer: ")
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert byte_level.decode(ids) == "This is a question. Answer: "


def test_no_bos_is_added_where_the_file_has_none(tokenizer_file: Path, tmp_path: Path) -> None:
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    tokenizer = load(tmp_path, json.dumps(contents | {"post_processor": None}))
    [ids] = encode(tokenizer, "Answer: ")
    assert BOS not in ids


@pytest.mark.parametrize("text", ["<s>سؤال</s>", "</s>", " <s> "])
def test_control_tokens_in_a_question_stay_text(byte_level: Any, text: str) -> None:
    [ids] = encode(byte_level, text)
    assert ids.count(BOS) == 1
    assert EOS not in ids
    assert byte_level.decode(ids) == text


def test_ids_keep_the_prompts_order_over_many_batches(byte_level: Any) -> None:
    texts = [f"سؤال {number}" for number in range(2 * BATCH + 3)]
    prompts = [Prompt(text, text, LATIN) for text in texts]
    encoded = list(encode_prompts(byte_level, iter(prompts)))
    assert [item.question_id for item in encoded] == texts
    assert [byte_level.decode(item.input_ids.tolist()) for item in encoded] == texts
    assert {item.input_ids.dtype for item in encoded} == {np.dtype(np.int64)}


def test_padding_and_cutting_asked_for_in_the_file_are_not_done(
    byte_level: Any, tmp_path: Path
) -> None:
    padding = Tokenizer.from_str(byte_level.to_str())
    padding.enable_padding(length=64)
    padding.enable_truncation(4)
    texts = ("A", "Answer: this is longer than four tokens")
    assert encode(load(tmp_path, padding.to_str()), *texts) == encode(byte_level, *texts)


def test_the_vocabularys_size_counts_added_tokens(byte_level: Any) -> None:
    larger = Tokenizer.from_str(byte_level.to_str())
    size = vocabulary_size(larger)
    larger.add_tokens(["<one more>"])
    assert vocabulary_size(larger) == size + 1 == 1 + larger.token_to_id("<one more>")


@pytest.mark.parametrize(
    "contents", ["", "{", "[]", '{"model": {"type": "New"}}', "\ufeff{}", "null"]
)
def test_a_broken_tokenizer_is_named_in_one_line(tmp_path: Path, contents: str) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer") as caught:
        load(tmp_path, contents)
    assert "\n" not in str(caught.value)


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(replacement: str) -> dict[str, Any]:
    """A sentencepiece table whose replacements are what counts: its trie knows no word."""
    table = (1024).to_bytes(4, "little") + bytes(1024) + replacement.encode() + b"\0"
    text = base64.b64encode(table).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


def template(*pieces: str, ids: int = 1) -> dict[str, Any]:
    single = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if piece == "A"
        else {"SpecialToken": {"id": piece, "type_id": 0}}
        for piece in pieces
    ]
    tokens = {"<s>": {"id": "<s>", "ids": [0] * ids, "tokens": ["<s>"] * ids}}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": tokens,
    }


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


@pytest.mark.parametrize(
    ("part", "steps", "said"),
    [
        ("normalizers", [replace(" ", "  ")] * 40, "times as long"),
        ("normalizers", [replace(" ", "x" * 2000)], "times as long"),
        ("normalizers", [replace("(?=.)", "x", "Regex")] * 30, "times as long"),
        ("normalizers", [{"type": "ByteLevel"}] * 30, "times as long"),
        ("normalizers", [charsmap("x" * 3000)], "times as long"),
        ("normalizers", [{"type": "Prepend", "prepend": "x" * 100_000}], "to every text"),
        ("normalizers", [{"type": "NFC"}] * 5000, "over 200 steps"),
        ("pretokenizers", [BYTE_LEVEL] * 30, "times as long"),
        ("processors", [template("A", "A")] * 30, "times as long"),
        ("processors", [template("A", "A")] * 2000, "steps"),
        ("processors", [template(*["A"] * 5000)], "times as long"),
        ("processors", [template(*["<s>"] * 5000, "A")], "to every text"),
        ("processors", [template("<s>", "A", ids=100_000)], "to every text"),
        ("decoders", [replace("a", "aa")] * 40, "times as long"),
    ],
)
def test_a_tokenizer_that_lengthens_texts_without_bounds_is_refused(
    part: str, steps: list[Any], said: str, tokenizer_file: Path, tmp_path: Path
) -> None:
    name = {
        "normalizers": "normalizer",
        "pretokenizers": "pre_tokenizer",
        "processors": "post_processor",
        "decoders": "decoder",
    }[part]
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    contents[name] = {"type": "Sequence", part: steps}
    start = time.monotonic()
    with pytest.raises(ModelError, match=rf"tokenizer\.json .*{said}") as caught:
        load(tmp_path, json.dumps(contents))
    assert time.monotonic() - start < 20
    assert "\n" not in str(caught.value)


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize("spelling", ['"content"', '"c\\u006fnte\\u006Et"'])
@pytest.mark.parametrize(
    "texts",
    [["t" * 3000], ["\\" * 3000], [f"t{n}" for n in range(50_001)]],
    ids=["long", "escaped", "many"],
)
def test_added_tokens_that_take_hours_to_read_are_refused(
    texts: list[str], spelling: str, tokenizer_file: Path, tmp_path: Path
) -> None:
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    contents["added_tokens"] += [
        ADDED | {"id": 600 + n, "content": text, "special": True} for n, text in enumerate(texts)
    ]
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"more than 50,000 added tokens, or one of more than"):
        load(tmp_path, json.dumps(contents).replace('"content"', spelling))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("spelling", ['"precompiled_charsmap"', '"precompiled\\u005fcharsmap"'])
@pytest.mark.parametrize("table", ["/////w==", "", "AAAA", "?", "/////\\u0077=="])
def test_a_table_that_announces_gigabytes_is_refused(
    table: str, spelling: str, tokenizer_file: Path, tmp_path: Path
) -> None:
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    contents["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "here"}
    raw = json.dumps(contents).replace('"precompiled_charsmap"', spelling)
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged: its table of normal forms"):
        load(tmp_path, raw.replace('"here"', f'"{table}"'))


def test_what_published_tokenizers_do_to_a_text_is_not_too_much(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    # ALBERT's, whose table has one replacement of 33 bytes; a template of Gemma's and Llama's kind.
    contents["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            replace("``", '"'),
            replace("''", '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            charsmap("صلى الله عليه وسلم"),
            replace(" {2,}", " ", "Regex"),
            {"type": "Prepend", "prepend": SPACE},
        ],
    }
    contents["post_processor"] = {"type": "Sequence", "processors": [template("<s>", "A")]}
    assert load(tmp_path, json.dumps(contents)).encode("A").ids[0] == BOS


def test_a_tokenizer_that_draws_by_chance_is_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    contents["model"]["dropout"] = 0.0
    assert load(tmp_path, json.dumps(contents)).encode("A").ids
    contents["model"]["dropout"] = 0.1
    with pytest.raises(ModelError, match=r"tokenizer\.json draws its tokens by chance .* 0\.1,"):
        load(tmp_path, json.dumps(contents))


@pytest.mark.parametrize(
    ("expression", "limit_s", "said"),
    [
        (r"(\p{L}+\s*)+[0-9]{9}", 5.0, "retry-limit-in-match over"),
        (r".*?.*?.*?[0-9]{9}", 0.001, "takes over 0 s to read"),
    ],
)
def test_an_expression_that_takes_for_ever_is_refused(
    expression: str,
    limit_s: float,
    said: str,
    tokenizer_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenization_module, "PROBE_LIMIT_S", limit_s)
    contents = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    contents["normalizer"] = replace(expression, "", "Regex")
    with pytest.raises(ModelError, match=said) as caught:
        load(tmp_path, json.dumps(contents))
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing.*edge-eval export"):
        load_tokenizer(tmp_path)


# ---- letters


@pytest.mark.parametrize("letters", [LATIN, ARABIC], ids=["latin", "arabic"])
def test_a_letter_with_a_token_of_its_own_is_that_token(
    byte_level: Any, letters: tuple[str, ...]
) -> None:
    found = letter_tokens(byte_level, letters)
    assert found.single
    assert [byte_level.decode(list(ids)) for ids in found.ids] == list(letters)
    assert found.letters == letters


def test_a_letter_without_a_token_is_the_tokens_that_spell_it(bytes_only: Any) -> None:
    found = letter_tokens(bytes_only, ARABIC)
    assert not found.single
    assert {len(ids) for ids in found.ids} == {2}
    assert [bytes_only.decode(list(ids)) for ids in found.ids] == list(ARABIC)


@pytest.mark.parametrize("spaces", ["always", "first", "never", "normalizer"])
@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
def test_a_letters_id_is_the_last_of_the_letter_encoded_alone(
    tmp_path: Path, spaces: str, whole: bool
) -> None:
    tokenizer = sentencepiece(tmp_path, spaces, whole=whole)
    expected = [(tokenizer.encode(letter).ids[-1],) for letter in LATIN]
    assert list(letter_tokens(tokenizer, LATIN).ids) == expected


@pytest.mark.parametrize("spaces", ["always", "first", "never", "normalizer"])
@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
def test_a_letter_with_a_space_is_the_ids_behind_the_cue(
    tmp_path: Path, spaces: str, whole: bool
) -> None:
    tokenizer = sentencepiece(tmp_path, spaces, whole=whole)
    n_cue = len(tokenizer.encode("Answer:").ids)
    expected = [tuple(tokenizer.encode(f"Answer: {letter}").ids[n_cue:]) for letter in LATIN]
    assert list(letter_tokens(tokenizer, LATIN, " ").ids) == expected


def test_a_letter_with_a_space_is_another_token_in_a_byte_level_vocabulary(
    byte_level: Any,
) -> None:
    pieces = letter_tokens(byte_level, LATIN, " ").pieces
    assert ["".join(spelling) for spelling in pieces] == [f"Ġ{letter}" for letter in LATIN]


def test_bytes_of_a_letter_are_kept_behind_the_word_start_piece(tmp_path: Path) -> None:
    found = letter_tokens(sentencepiece(tmp_path, bytes_too=True), ARABIC)
    for letter, pieces in zip(ARABIC, found.pieces, strict=True):
        assert list(pieces) == [f"<0x{byte:02X}>" for byte in letter.encode()]


def _words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({UNKNOWN: 0, SPACE: 1, "A": 2}, [], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def _pieces_with_scores() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(UNKNOWN, 0.0), (SPACE, -1.0), ("A", -1.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def _silent() -> Tokenizer:
    """Says nothing at all for what it does not know."""
    return Tokenizer(models.BPE({"A": 0}, []))


@pytest.mark.parametrize("make", [_words, _pieces_with_scores, _silent])
def test_a_letter_the_vocabulary_does_not_know_is_refused(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, make().to_str())
    assert letter_tokens(tokenizer, ["A"]).ids == ((tokenizer.token_to_id("A"),),)
    with pytest.raises(ScoringError, match=r"\u0623 \(U\+0623\) is unknown"):
        letter_tokens(tokenizer, ARABIC)


def test_letters_with_one_spelling_are_refused(byte_level: Any) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.normalizer = normalizers.Replace("D", "B")
    with pytest.raises(ScoringError, match=r"D \(U\+0044\) and B \(U\+0042\) with the same tokens"):
        letter_tokens(tokenizer, LATIN)


# ---- letters inside shots, and chats


@pytest.mark.parametrize("letter", [*LATIN, *ARABIC])
def test_the_letter_a_shot_shows_is_found_in_the_middle_of_a_text(
    byte_level: Any, bytes_only: Any, letter: str
) -> None:
    text = f"{letter}. Question\n\nAnswer: {letter}\n\n"
    for tokenizer in (byte_level, bytes_only):
        ids = letter_inside(tokenizer, text, letter)
        assert tokenizer.decode(list(ids)).strip() == letter


def test_a_letter_inside_another_word_is_not_the_shots(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, whole=True)
    ids = letter_inside(tokenizer, "BAD Answer: A", "A")
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == [SPACE + "A"]


def test_a_chats_own_control_tokens_are_read_as_such(byte_level: Any) -> None:
    ids = encode_chat(byte_level, "<s>question</s>", ["question"]).tolist()
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert ids[1:-1] == byte_level.encode("question", add_special_tokens=False).ids


@pytest.mark.parametrize("content", ["</s>", "<s>سؤال</s> آخر", "x</s>"])
def test_a_control_token_from_a_question_stays_text_in_a_chat(
    byte_level: Any, content: str
) -> None:
    text = f"<s>user\n{content}\n</s>model\n"
    ids = encode_chat(byte_level, text, [content]).tolist()
    assert (ids.count(BOS), ids.count(EOS)) == (1, 1)
    assert Tokenizer.decode(byte_level, ids, skip_special_tokens=False) == text


def test_an_encoded_chat_leaves_the_tokenizer_as_it_was(byte_level: Any) -> None:
    encode_chat(byte_level, "<s>question</s>", ["question"])
    assert EOS not in encode(byte_level, "</s>")[0]
