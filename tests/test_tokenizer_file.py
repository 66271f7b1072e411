"""A tokenizer read in parts is the one that the library reads whole."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edge_eval import tokenizer_file
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import RunConfig
from edge_eval.tokenizer_file import read_tokenizer

TEXTS = ["Answer: A", "<bos>\n\n x  y\t<turn>", 'quotes " and \\ and "]}', "الإجابة: ب"]


def made_tokenizer() -> Any:
    """A BPE vocabulary with what a JSON text has to escape."""
    words = [*"abcABC ▁", '"', "\\", "]", "}", "ا", "ب", "é", "\u2028", "<unk>", "<bos>"]
    pairs = [("a", "b"), ('"', "]"), ("\\", "\\"), ("]", "}"), ("ا", "ب"), ("ab", "c"), ('"]', "}")]
    merged = ["".join(pair) for pair in pairs]
    vocab = {token: index for index, token in enumerate([*words, *merged])}
    model = models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>", fuse_unk=True)  # noqa: S106
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_previous")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens(["<bos>", AddedToken("<turn>", special=True, lstrip=True)])
    tokenizer.add_tokens([AddedToken("  ", normalized=False)])
    return tokenizer


def in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tokenizer read in parts; fails where the plain way would be taken."""
    monkeypatch.setattr(tokenizer_file, "LARGE_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_file, "Tokenizer", SimpleNamespace(from_str=Tokenizer.from_str))
        return read_tokenizer(path)


def same(ours: Any, theirs: Any, texts: list[str]) -> None:
    assert json.loads(ours.to_str()) == json.loads(theirs.to_str())
    for text in texts:
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_vocabulary_merges_and_added_tokens_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    theirs = made_tokenizer()
    theirs.save(str(path), pretty=False)
    same(in_parts(path, monkeypatch), theirs, TEXTS)
    theirs.save(str(path), pretty=True)
    same(in_parts(path, monkeypatch), theirs, TEXTS)


def test_merges_written_as_one_text_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    fields = json.loads(made_tokenizer().to_str())
    fields["model"]["merges"] = [" ".join(pair) for pair in fields["model"]["merges"]]
    path.write_text(json.dumps(fields), encoding="utf-8")
    same(in_parts(path, monkeypatch), Tokenizer.from_file(str(path)), TEXTS)


def test_the_tiny_models_prompts_are_the_same(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model / "tokenizer.json"
    theirs = Tokenizer.from_file(str(path))
    texts = [render(q, "ar-arabic").text for q in load_questions(RunConfig()).test[:40]]
    monkeypatch.setattr(tokenizer_file, "LARGE_BYTES", 0)
    same(read_tokenizer(path), theirs, texts)


@pytest.mark.parametrize("form", ["close", "pretty", "joined"])
def test_merges_by_the_thousand_are_the_same_in_the_same_order(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some hold what stands between merges, or need escapes."""
    letters = [chr(code) for code in range(0x4E00, 0x4E00 + 3000)]
    odd = ["],[", ",", "],", '"', "\\", "[", "]", '","', '"],["']
    vocab = {token: index for index, token in enumerate([*letters, *odd])}
    pairs = [*itertools.pairwise(letters)]
    pairs += [(left, right) for left in odd for right in [*odd, letters[0]]]
    pairs += [*zip(letters, letters[2:], strict=False)]
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    path = tmp_path / "tokenizer.json"
    theirs = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    theirs.save(str(path), pretty=form == "pretty")
    if form == "joined":
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["model"]["merges"] = [" ".join(pair) for pair in pairs]
        path.write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
    same(in_parts(path, monkeypatch), theirs, ["".join(letters), "".join(odd * 2) + letters[0]])


@pytest.mark.parametrize(
    "pairs",
    [
        [["a b", "c"]],
        [["a b", "c"], ["a", "b"]],
        [["a", "\n"]],
        [["#version", "a"]],
        [["#version", "a"], ["a", "b"]],
        [["a", "b", "c"]],
    ],
)
def test_what_does_not_fit_a_line_is_read_the_plain_way(
    pairs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merges of tokens that hold a space or a line's end."""
    fields = json.loads(made_tokenizer().to_str())
    vocab = fields["model"]["vocab"]
    for token in ("a b", "a bc", "\n", "a\n", "#version", "#versiona"):
        vocab.setdefault(token, len(vocab))
    fields["model"]["merges"] = pairs
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    monkeypatch.setattr(tokenizer_file, "LARGE_BYTES", 0)
    if len(pairs[0]) == 3:
        with pytest.raises(Exception, match=r"merge|tuple|length|untagged|invalid"):
            read_tokenizer(path)
        return
    same(read_tokenizer(path), Tokenizer.from_file(str(path)), [*TEXTS, "a bc", "a\n"])


@pytest.mark.parametrize("cut", [10, 200, -40, -1])
def test_a_file_cut_short_is_told_as_the_library_tells_it(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(made_tokenizer().to_str()[:cut], encoding="utf-8")
    monkeypatch.setattr(tokenizer_file, "LARGE_BYTES", 0)
    with pytest.raises(Exception, match=r"EOF|expected|line") as found:
        read_tokenizer(path)
    with pytest.raises(Exception, match=r"EOF|expected|line") as plain:
        Tokenizer.from_file(str(path))
    assert str(found.value) == str(plain.value)


def test_a_full_temp_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    made_tokenizer().save(str(path))
    monkeypatch.setattr(tokenizer_file, "LARGE_BYTES", 0)
    monkeypatch.setattr(tokenizer_file.tempfile, "tempdir", str(tmp_path / "not there"))
    same(read_tokenizer(path), made_tokenizer(), TEXTS)
