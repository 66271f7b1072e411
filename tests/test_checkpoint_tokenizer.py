"""A checkpoint's tokenizer becomes a tokenizer.json that is proved, or said to differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from edge_eval.errors import ExportError
from edge_eval.model_dir import read_manifest
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import Question, RunConfig
from edge_eval.tokenization import load_tokenizer
from exporters.checkpoint_tokenizer import tokenizer_note, write_tokenizer
from exporters.cli import export
from exporters.huggingface import quiet
from exporters.verify import TEMPLATES

pytest.importorskip("transformers", reason="tokenizers are loaded by it, of the export extra")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}


def settings(folder: Path, tokenizer_class: str, **others: Any) -> Path:
    """A checkpoint's tokenizer_config.json, and what config.json says of a tokenizer: nothing."""
    text = json.dumps({"tokenizer_class": tokenizer_class} | others)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def llama(tmp_path: Path, train_sentencepiece: Callable[..., Path]) -> Path:
    """Llama's kind: a sentencepiece BPE with byte fallback, as tokenizer.model alone."""
    folder = tmp_path / "llama"
    folder.mkdir()
    train_sentencepiece(
        folder / "tokenizer.model",
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
    )
    return settings(folder, "LlamaTokenizer", add_bos_token=True, legacy=False)


@pytest.fixture
def t5(tmp_path: Path, write_t5_tokenizer: Callable[[Path], None]) -> Path:
    """T5's kind: a sentencepiece unigram, as spiece.model alone."""
    folder = tmp_path / "t5"
    folder.mkdir()
    write_t5_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def gpt2(tmp_path: Path, write_tokenizer: Callable[[Path], int]) -> Path:
    """GPT-2's kind: a byte-level BPE, as vocab.json and merges.txt."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    write_tokenizer(folder)
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    return settings(folder, "GPT2Tokenizer", **SPECIAL)


def sample_texts() -> list[str]:
    questions = load_questions(RunConfig(data="sample")).test
    return [render(question, name).text for name in TEMPLATES for question in questions]


@pytest.mark.parametrize(
    ("kind", "slow"),
    [("llama", "LlamaTokenizer"), ("t5", "T5Tokenizer"), ("gpt2", "GPT2Tokenizer")],
)
def test_a_tokenizer_without_tokenizer_json_is_converted_and_proved(
    kind: str, slow: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoTokenizer

    folder, directory = request.getfixturevalue(kind), tmp_path / "model"
    directory.mkdir()
    facts = write_tokenizer(folder, directory)
    assert facts["converted"]
    assert facts["slow"] == slow
    assert (facts["n_prompts"], facts["n_different"]) == (4 * 160, 0)
    assert (facts["letters"], facts["example"]) == ([], None)
    assert tokenizer_note(facts) is None
    theirs, ours = AutoTokenizer.from_pretrained(folder, use_fast=False), load_tokenizer(directory)
    assert not theirs.is_fast
    for text in sample_texts()[::40]:
        assert ours.encode(text).ids == theirs(text)["input_ids"]


def test_a_converted_sentencepiece_gives_sentencepieces_own_ids(
    llama: Path, tmp_path: Path
) -> None:
    import sentencepiece

    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(llama, directory)
    theirs = sentencepiece.SentencePieceProcessor(str(llama / "tokenizer.model"))
    ours = load_tokenizer(directory)
    texts = sample_texts()
    assert [ours.encode(text).ids for text in texts] == [
        [theirs.bos_id(), *theirs.encode(text)] for text in texts
    ]
    # Characters that the vocabulary lacks are there, so byte fallback was asked too.
    assert any(theirs.is_byte(token_id) for text in texts for token_id in theirs.encode(text))


def test_a_conversion_that_loses_something_is_refused(
    tmp_path: Path, train_sentencepiece: Callable[..., Path]
) -> None:
    """A unigram with byte fallback is converted into one that says <unk> instead."""
    folder, directory = tmp_path / "t5", tmp_path / "model"
    for path in (folder, directory):
        path.mkdir()
    train_sentencepiece(
        folder / "spiece.model",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        byte_fallback=True,
        character_coverage=0.98,
    )
    settings(folder, "T5Tokenizer", extra_ids=0)
    wrong = pytest.raises(ExportError, match="the converted one is wrong: on ")
    with quiet(), wrong as caught:  # transformers warns of it too
        write_tokenizer(folder, directory)
    message = str(caught.value)
    assert "\n" not in message
    assert "<0x" in message
    assert "<unk>" in message


def test_a_checkpoint_whose_two_tokenizers_disagree_is_exported_and_told(
    make_checkpoint: Any,
    sample_questions: tuple[Question, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = make_checkpoint("t5")
    # As old conversions did: a cue's last space becomes a token.
    path = checkpoint / "tokenizer.json"
    contents = json.loads(path.read_text(encoding="utf-8"))
    assert contents["normalizer"]["normalizers"].pop(1)["type"] == "Strip"
    path.write_text(json.dumps(contents), encoding="utf-8")
    export(source=str(checkpoint), output=tmp_path / "model")
    facts = read_manifest(tmp_path / "model").tokenizer
    assert facts is not None
    assert not facts["converted"]
    assert facts["slow"] == "T5Tokenizer"
    assert facts["n_prompts"] == facts["n_different"] == 4 * len(sample_questions)
    assert facts["example"]["question"] == sample_questions[0].id
    assert facts["example"]["slow"][-1] == "</s>"
    assert facts["example"]["fast"][-2:] == ["\u2581", "</s>"]
    told = capsys.readouterr().err
    assert "Note: on 640 of 640 sample prompts tokenizer.json gives other tokens" in told
    assert sample_questions[0].id in told


def test_a_checkpoint_with_tokenizer_json_alone_has_nothing_to_compare(tiny_model: Path) -> None:
    facts = read_manifest(tiny_model).tokenizer
    assert facts == {"converted": False, "slow": None}
    assert tokenizer_note(facts) is None


def test_a_tokenizer_that_cannot_be_proved_is_refused(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    # As for a file of a kind not known here: nothing to hold the conversion against.
    monkeypatch.setattr("exporters.checkpoint_tokenizer.SLOW_FILES", ())
    with pytest.raises(ExportError, match="no other tokenizer of it to prove"):
        write_tokenizer(gpt2, directory)


def test_a_tokenizer_that_cannot_be_converted_is_named_in_a_line(
    gpt2: Path, tmp_path: Path
) -> None:
    settings(gpt2, "GPTNeoXTokenizerFast", **SPECIAL)  # a class that only reads tokenizer.json
    with pytest.raises(ExportError, match="no tokenizer that transformers can load") as caught:
        write_tokenizer(gpt2, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
