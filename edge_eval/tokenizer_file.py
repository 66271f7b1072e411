"""tokenizer.json -> tokenizer; a large BPE vocabulary without the copies that reading it whole makes.

The tokenizers library first holds all of the file's JSON as values: for Gemma's 262,144 tokens 360 MB
at the most, where vocabulary and merges read from files of their own take 160. So those two are cut
out of the text, unparsed, and given to it as such files. What does not look as the library itself
writes it is read the plain way.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import AddedToken, Tokenizer, models

LARGE_BYTES = 4 << 20  # below, the plain way takes little

_TOKEN = rb'"((?:[^"\\]++|\\.)*+)"'
# A vocabulary's values are numbers, so nothing within it looks like what follows it.
_BETWEEN = re.compile(rb'\}\s*,\s*"merges"\s*:\s*\[')
_PAIR = re.compile(rb"\s*\[\s*%s\s*,\s*%s\s*\]\s*([,\]])" % (_TOKEN, _TOKEN))
_JOINED = re.compile(rb"\s*%s\s*([,\]])" % _TOKEN)
# Many at once, none the last, of tokens without quotes or escapes: what stands between two quotes is
# then a token, or lies between tokens, by turns.
_PLAIN = rb'"[^"\\ \x00-\x1f]++"'
_PAIRS = re.compile(rb"(?:\s*+\[\s*+%s\s*+,\s*+%s\s*+\]\s*+,){1,4096}+" % (_PLAIN, _PLAIN))
_JOINS = re.compile(rb'(?:\s*+"[^"\\ \x00-\x1f]++ [^"\\ \x00-\x1f]++"\s*+,){1,4096}+')


class _OtherForm(Exception):  # noqa: N818 - no error: the plain way reads it
    """The file is not in the form that can be cut."""


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a tokenizer.json.

    Errors: OSError, and what the tokenizers library raises for a file that is none.
    """
    if path.stat().st_size >= LARGE_BYTES:
        try:
            return _read_in_parts(path.read_bytes())
        except (_OtherForm, ValueError, TypeError, KeyError, RecursionError, OSError):
            pass  # the plain way tells what is wrong with it, if anything is
    return Tokenizer.from_file(str(path))


def _read_in_parts(content: bytes) -> Any:
    start = content.find(b'"vocab"')
    vocabulary = content.find(b"{", start)
    between = _BETWEEN.search(content, vocabulary)
    if start < 0 or vocabulary < 0 or between is None:
        raise _OtherForm
    with tempfile.TemporaryDirectory() as folder:
        vocab, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocab.write_bytes(memoryview(content)[vocabulary : between.start() + 1])
        with merges.open("wb") as file:
            end = _write_merges(content, between.end(), file)
        rest = json.loads(content[:vocabulary] + b'{},"merges":[' + content[end:])
        del content
        model = rest["model"]
        if model["type"] != "BPE" or model["vocab"] or model["merges"]:
            raise _OtherForm
        settings = {
            name: value
            for name, value in model.items()
            if name not in {"type", "vocab", "merges"} and value is not None
        }
        bpe = models.BPE.from_file(str(vocab), str(merges), **settings)
    added = rest["added_tokens"]
    rest["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(rest))
    tokenizer.model = bpe
    tokens = [_added_token(entry) for entry in sorted(added, key=lambda entry: entry["id"])]
    tokenizer.add_tokens(tokens)
    if any(tokenizer.token_to_id(entry["content"]) != entry["id"] for entry in added):
        raise _OtherForm
    return tokenizer


def _added_token(entry: dict[str, Any]) -> Any:
    flags = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(entry["content"], special=entry["special"], **flags)


def _write_merges(content: bytes, start: int, file: BinaryIO) -> int:
    """Write the merges from ``start`` on as lines of merges.txt; where their list ends."""
    file.write(b"#version: 0.2\n")
    in_pairs = content[start : start + 64].lstrip()[:1] == b"["
    one, many = (_PAIR, _PAIRS) if in_pairs else (_JOINED, _JOINS)
    while True:
        if found := many.match(content, start):
            start = found.end()
            if b'"#version' in found[0]:
                raise _OtherForm
            lines = found[0].split(b'"')[1::2]
            if in_pairs:
                lines = list(map(b" ".join, zip(lines[::2], lines[1::2], strict=True)))
            file.write(b"\n".join(lines) + b"\n")
        if not (found := one.match(content, start)):
            raise _OtherForm
        start = found.end()
        *parts, closing = found.groups()
        line = b" ".join(parts)
        if b"\\" in line:
            line = b" ".join(json.loads(b'"%s"' % part).encode() for part in parts)
        # A line is two tokens with a space between: one with a space or a line end does not fit.
        if line.count(b" ") != 1 or b"\n" in line or b"\r" in line or line.startswith(b"#version"):
            raise _OtherForm
        file.write(line + b"\n")
        if closing == b"]":
            return start - 1
