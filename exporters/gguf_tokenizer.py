r"""GGUF vocabulary -> tokenizer.json, equal to llama.cpp token for token; add to PRE_TOKENIZERS.

Two kinds of vocabulary are known, by ``tokenizer.ggml.model``: "llama" (SentencePiece BPE: the
piece with the highest score is merged first) and "gpt2" (byte-level BPE: the listed merges, inside
the words that the expressions of ``tokenizer.ggml.pre`` cut). Anything else is refused by name.

What llama.cpp calls ``parse_special=False`` is ``tokenizer.encode_special_tokens = True`` here.
Where the two cannot be made equal the vocabulary is refused, but for two cases: a text in which two
added tokens overlap, and the letters, digits and punctuation new in Unicode 16 ("gpt2" only), which
llama.cpp does not know yet.

Source: ggml-org/llama.cpp at 0c1e57098, src/llama-vocab.cpp and src/unicode.cpp: facts, not code.
"""

import json
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from edge_eval.errors import ExportError

T = TypeVar("T")

SPACE = "\u2581"  # SentencePiece's visible space
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type

# llama.cpp takes these for control tokens whatever their stated type.
CONTROL_LOOKING = re.compile(
    r"<\|(?:eot_id|im_end|end|return|call|flush|calls|endoftext|eom_id|end_of_text|repo_name|"
    r"fim_(?:prefix|suffix|middle|pad|repo)|(?:code_)?(?:prefix|suffix|middle)|file_sep)\|>"
    r"|</s>|<eos>|<end_of_turn>|<end_of_utterance>|<turn\|>|<\|tool_response>|_?<EOT>|\[e~\["
    r"|\[(?:EOT|EOS|PAD)\]|<fim[-_](?:prefix|suffix|middle|pad)>|<fim-repo>|<reponame>|<REPO>"
    r"|<PAD>|▁?<(?:PRE|SUF|MID)>|<｜(?:end▁of▁sentence|fim▁(?:begin|hole|end))｜>"
)


def read_metadata(path: Path) -> dict[str, object]:
    """The keys and values at the head of a GGUF file.

    Read here and not by the gguf package, whose reader takes 25 s for 262,144 tokens. A token whose
    bytes are not UTF-8 gets a name of its own: llama.cpp keeps it too, but no text reaches it.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Cursor(data).metadata()
    except OSError as error:
        raise ExportError(
            f"{path}: {error.strerror or error}: give a .gguf file that can be read"
        ) from error
    except ValueError as error:
        raise ExportError(
            f"{path}: not a GGUF file that can be read ({error}): download or convert it again"
        ) from error


def build_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes.

    Raises ExportError for a vocabulary that is unknown, incomplete, or beyond tokenizer.json.
    """
    model = _model(metadata)
    tokens = _tokens(metadata)
    build = _sentencepiece if model == "llama" else _byte_level
    tokenizer = build(metadata, tokens)
    _add_tokens(tokenizer, metadata, tokens)
    _add_ends(tokenizer, metadata, tokens)
    return tokenizer


def tokenizer_config(metadata: Mapping[str, object]) -> dict[str, object]:
    """The content of tokenizer_config.json; a token or length that is not stated is left out."""
    tokens = _tokens(metadata)
    add_bos, add_eos = _ends(metadata)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    for name in ("bos", "eos", "unk", "pad"):
        token_id = _special_id(metadata, name, len(tokens))
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    architecture = _value(metadata, "general.architecture", str, "")
    if length := _value(metadata, f"{architecture}.context_length", int, 0):
        config["model_max_length"] = length
    if template := _value(metadata, "tokenizer.chat_template", str, ""):
        config["chat_template"] = template
    return config


def write_tokenizer_files(metadata: Mapping[str, object], directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where one is stated, chat_template.jinja."""
    files = {
        "tokenizer.json": build_tokenizer(metadata).to_str(),
        "tokenizer_config.json": json.dumps(
            tokenizer_config(metadata), ensure_ascii=False, indent=2
        ),
        "chat_template.jinja": _value(metadata, "tokenizer.chat_template", str, ""),
    }
    for name, text in files.items():
        if text:
            # A template's line ends are part of the prompt: newline="" keeps them.
            (directory / name).write_text(text, encoding="utf-8", newline="")


def _sentencepiece(metadata: Mapping[str, object], tokens: list[str]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    missing = [piece for byte in range(256) if (piece := f"<0x{byte:02X}>") not in vocabulary]
    if missing:
        raise ExportError(
            f"the GGUF vocabulary has no piece {missing[0]} ({len(missing)} of 256 bytes are "
            "missing), so unknown characters would vanish: convert the model again"
        )
    scores = _list(metadata, "tokenizer.ggml.scores", (float, int), len(tokens))
    merges = _merges(tokens, scores, _types(metadata, tokens))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _value(metadata, "tokenizer.ggml.add_space_prefix", bool, True):
        # Both put the space before every stretch of text between added tokens.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the pair that llama.cpp merges first coming first.

    It merges any two neighbours whose text is a piece: the best score first, of equal scores the
    leftmost. An order of pairs cannot say "leftmost", but for runs of one character the longest
    piece first, and its longest left part first, comes to the same.
    """
    vocabulary = set(tokens)
    characters = {token for token in tokens if len(token) == 1}
    merges: list[tuple[str, str]] = []
    last = ("", float("nan"))  # the piece merged before this one, and its score
    for piece, score, kind in sorted(
        zip(tokens, scores, types, strict=True),
        key=lambda entry: (-entry[1], -len(entry[0])),
    ):
        # No space is left when merging begins, and most user-defined tokens are cut out by then.
        if " " in piece or (kind == USER_DEFINED and SPACE not in piece):
            continue
        found = [
            (left, right)
            for cut in range(len(piece) - 1, 0, -1)
            if (left := piece[:cut]) in vocabulary and (right := piece[cut:]) in vocabulary
        ]
        merges += found
        # llama.cpp merges a character that is no piece itself; here it becomes bytes at once.
        if not characters.issuperset(piece) and any(
            all(part in vocabulary or len(part) == 1 for part in cut)
            for cut in ((piece[:1], piece[1:]), (piece[:-1], piece[-1:]))
        ):
            raise _inexpressible(f"the piece {piece!r:.80} but not all of its characters")
        if not found or kind in (UNKNOWN, CONTROL):
            continue
        if score == last[1] and len(set(piece)) + len(set(last[0])) > 2:
            raise _inexpressible(
                f"the pieces {last[0]!r:.80} and {piece!r:.80} of equal score {score}"
            )
        last = (piece, score)
    return merges


def _inexpressible(what: str) -> ExportError:
    return ExportError(
        f"the GGUF vocabulary has {what}: llama.cpp's tokens for that cannot be written as "
        "tokenizer.json; export the original checkpoint instead"
    )


def _byte_level(metadata: Mapping[str, object], tokens: list[str]) -> Tokenizer:
    pre = _pre_tokenizer(metadata)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: dict[tuple[str, str], None] = {}  # the first of two equal merges counts
    for line in _list(metadata, "tokenizer.ggml.merges", str):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ExportError(
                f"the GGUF merge {line!r:.80} uses or makes a piece that is not in "
                "tokenizer.ggml.tokens: convert the model again"
            )
        merges.setdefault((left, right))
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    # A byte without a piece gives no token, but in llama.cpp it still keeps its neighbours apart.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if missing := "|".join(re.escape(c) for c in sorted(alphabet) if c not in vocabulary):
        steps.append(pre_tokenizers.Split(Regex(missing), "isolated"))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=pre.ignore_merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, object], tokens: list[str]) -> None:
    """Have the control, unknown and user-defined tokens found in the text before anything else."""
    # Phi-3's tokens swallow the space after them, which no GGUF key says.
    name = _value(metadata, "general.name", str, "").lower()
    greedy = "phi-3" in name or "phi3" in name
    # Where two overlap in a text, the leftmost wins here, the longest in llama.cpp.
    added = []
    for text, kind in zip(tokens, _types(metadata, tokens), strict=True):
        special = kind in (UNKNOWN, CONTROL) or bool(CONTROL_LOOKING.fullmatch(text))
        if special or kind == USER_DEFINED:
            rstrip = greedy and text not in {"<unk>", "<s>", "<|endoftext|>"}
            added.append(AddedToken(text, rstrip=rstrip, normalized=False, special=special))
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, object], tokens: list[str]) -> None:
    """Have the tokens that begin and end a text put there, where the metadata says so."""
    pieces, special_tokens = ["$A"], []
    for name, wanted in zip(("bos", "eos"), _ends(metadata), strict=True):
        if not wanted:
            continue
        token_id = _special_id(metadata, name, len(tokens))
        if token_id is None:
            raise ExportError(
                f"the GGUF metadata wants a token at each text's {name} but has no valid "
                f"{SPECIAL_KEYS[name]}: convert the model again"
            )
        pieces.insert(0 if name == "bos" else len(pieces), tokens[token_id])
        special_tokens.append((tokens[token_id], token_id))
    if special_tokens:
        pair = [*pieces, *("$B" if piece == "$A" else piece for piece in pieces)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pieces, pair=pair, special_tokens=special_tokens
        )


SPECIAL_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}


def _special_id(metadata: Mapping[str, object], name: str, n_tokens: int) -> int | None:
    """The token's id; where it is not stated or out of range, llama.cpp's default for "llama".

    The default for "gpt2", 11, is one model's id from the format's first days and not used here.
    """
    default = {"bos": 1, "eos": 2, "unk": 0}.get(name, -1) if _model(metadata) == "llama" else -1
    for token_id in (_value(metadata, SPECIAL_KEYS[name], int, -1), default):
        if 0 <= token_id < n_tokens:
            return token_id
    return None


def _ends(metadata: Mapping[str, object]) -> tuple[bool, bool]:
    """Whether a text gets a BOS, an EOS; the defaults are llama.cpp's."""
    bos = True if _model(metadata) == "llama" else _pre_tokenizer(metadata).add_bos
    return (
        _value(metadata, "tokenizer.ggml.add_bos_token", bool, bos),
        _value(metadata, "tokenizer.ggml.add_eos_token", bool, False),
    )


def _model(metadata: Mapping[str, object]) -> str:
    model = _value(metadata, "tokenizer.ggml.model", str)
    if model not in ("llama", "gpt2"):
        raise ExportError(
            f"the GGUF tokenizer model {model!r:.80} is not supported, only 'llama' and 'gpt2': "
            "export the original checkpoint instead"
        )
    return model


def _pre_tokenizer(metadata: Mapping[str, object]) -> "PreTokenizer":
    name = _value(metadata, "tokenizer.ggml.pre", str, "") or "default"
    if name not in PRE_TOKENIZERS:
        raise ExportError(
            f"the GGUF pre-tokenizer {name!r:.80} is not supported, only "
            f"{', '.join(PRE_TOKENIZERS)}: export the original checkpoint instead"
        )
    return PRE_TOKENIZERS[name]


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    listed = _list(metadata, "tokenizer.ggml.tokens", str)
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(listed)]
    (text, n), *_ = Counter(tokens).most_common(1) or [("", 0)]
    if n != 1:
        raise ExportError(
            f"the GGUF vocabulary has the token {text!r:.80} {n} times: convert the model again"
        )
    return tokens


def _types(metadata: Mapping[str, object], tokens: list[str]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    return _list(metadata, key, int, len(tokens)) if key in metadata else [1] * len(tokens)


def _value(metadata: Mapping[str, object], key: str, kind: type[T], default: T | None = None) -> T:
    value = metadata.get(key, default)
    if not isinstance(value, kind):
        found = f"is a {type(value).__name__}, not a {kind.__name__}"
        raise ExportError(
            f"the GGUF metadata's {key} {found if key in metadata else 'is missing'}: "
            "convert the model again"
        )
    return value


def _list(
    metadata: Mapping[str, object],
    key: str,
    kind: type[T] | tuple[type[T], ...],
    n_wanted: int | None = None,
) -> list[T]:
    values = _value(metadata, key, list)
    if not all(isinstance(value, kind) for value in values) or len(values) < (n_wanted or 0):
        raise ExportError(
            f"the GGUF metadata's {key} has values of another type, or fewer than there are "
            "tokens: convert the model again"
        )
    return values[:n_wanted]


# A GGUF value's type -> the struct module's letter.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_ITEMS = 1 << 24  # of a list: far above any vocabulary


class Cursor:
    """A place in a GGUF file; every read moves it on. Raises ValueError saying what is wrong."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def metadata(self) -> dict[str, object]:
        if (magic := self.take(4)) != b"GGUF":
            raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
        (version,) = self.numbers("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, not 2 or 3 in little-endian order")
        _n_tensors, n_keys = self.numbers("Q", 2)
        metadata: dict[str, object] = {}
        for _ in range(n_keys):
            key = self.text()
            if key in metadata:
                raise ValueError(f"the key {key[:80]!r} stands in it twice")
            metadata[key] = self.value(key)
        return metadata

    def value(self, key: str) -> object:
        (kind,) = self.numbers("I")
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            (kind,), (n,) = self.numbers("I"), self.numbers("Q")
            if n > MAX_ITEMS:  # each takes some ten times its bytes in memory
                raise ValueError(f"the key {key[:80]!r} has a list of {n:,} values")
            if kind in NUMBERS:
                return list(self.numbers(NUMBERS[kind], n))
            if kind == STRING and key == "tokenizer.ggml.tokens":
                return [self.text(f"[NOT_UTF8_{index}]") for index in range(n)]
            if kind == STRING:
                return [self.text() for _ in range(n)]
        raise ValueError(f"the key {key[:80]!r} has a value of the unknown type {kind}")

    def text(self, instead: str | None = None) -> str:
        raw = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            if instead is None:
                raise
            return instead

    def numbers(self, letter: str, n: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{n}{letter}", self.take(n * struct.calcsize(f"<{letter}")))

    def take(self, n: int) -> bytes:
        start, self.at = self.at, self.at + n
        if self.at > len(self.data):
            raise ValueError(f"it ends after {len(self.data)} bytes, inside its metadata")
        return self.data[start : self.at]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How llama.cpp cuts a text into words before byte-level BPE.

    Each pattern cuts again what those before it have cut; what lies between matches is a word too.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS}|{_SPACES}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
# Runs of spaces fall into powers of two.
_JAIS2 = _LLAMA3.replace(_SPACES, "|".join(rf"\s{{{2**k}}}(?!\S)" for k in range(9, 1, -1)))
_JAIS2 += r"|\s{1,2}(?!\S)|\s{1}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# By the name in tokenizer.ggml.pre.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "mellum", "a.x-4.0", "exaone4", "mpt", "olmo", "jais"),
        PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"),
        PreTokenizer((_QWEN2,)),
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "jais-2": PreTokenizer((_JAIS2,)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}
