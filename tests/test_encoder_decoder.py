"""An encoder-decoder is asked as the paper's code asks it, by every command or not at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_evaluate import config_of, prompts_of, values
from test_model_dir import copy_model, edit

from edge_eval.bench import measure
from edge_eval.doctor import examine
from edge_eval.errors import ExportError, ModelError, OptionError
from edge_eval.evaluate import evaluate
from edge_eval.letters import ARABIC, LATIN, OPTION_LETTERS
from edge_eval.model_dir import read_manifest
from edge_eval.preparation import prepare
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import RunConfig
from edge_eval.tokenization import letter_tokens, load_tokenizer
from exporters.quantize import quantize
from exporters.verify import verify_directory

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAD, END = 0, 1


@pytest.fixture(scope="module")
def t5(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of a tiny t5 and its model directory."""
    from exporters.huggingface import export_checkpoint

    checkpoint = make_checkpoint("t5")
    directory = tmp_path_factory.mktemp("models") / "tiny-t5"
    export_checkpoint(str(checkpoint), directory)
    return checkpoint, directory


def paper_logits(checkpoint: Path, texts: list[str], letters: tuple[str, ...]) -> Any:
    """The letters' logits (texts, letters) by the paper's rule, in torch, one text at a time.

    Source: mbzuai-nlp/ArabicMMLU, util_compute.py, predict_classification_mt0_by_letter.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    first_ids = [tokenizer.encode(letter)[0] for letter in letters]
    given = tokenizer("<pad>", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        rows = [
            model(**tokenizer(text, return_tensors="pt"), decoder_input_ids=given).logits[0, -1]
            for text in texts
        ]
    return torch.stack(rows)[:, first_ids].numpy()


@pytest.mark.parametrize("prompt", ["en", "ar"])
@pytest.mark.parametrize("letters", ["latin", "arabic"])
def test_a_run_gives_the_logits_of_the_papers_rule(
    prompt: str, letters: str, t5: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, directory = t5
    config = config_of(directory, prompt=prompt, letters=letters)
    record = evaluate(config, tmp_path / "record.jsonl")
    texts = [render(q, config.template).text for q in load_questions(config).test]
    expected = paper_logits(checkpoint, texts, OPTION_LETTERS)
    np.testing.assert_allclose(values(record), expected, atol=1e-4 * np.abs(expected).max())
    assert record.scoring["decoder_input_ids"] == [PAD, END]
    for row, p in zip(expected, record.predictions, strict=True):
        own = row[:5] if letters == "latin" else row[5:]
        assert p.predicted == int(own[: len(p.letters)].argmax())


def test_the_papers_decoder_input_is_what_transformers_makes_of_pad(t5: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    checkpoint, directory = t5
    manifest = read_manifest(directory)
    given = AutoTokenizer.from_pretrained(checkpoint)("<pad>")["input_ids"]
    assert list(manifest.decoder_paper_ids) == given == [PAD, END]
    assert manifest.decoder_start_ids == (PAD,)


def test_other_protocols_read_the_letter_where_generation_begins(
    t5: tuple[Path, Path], tmp_path: Path
) -> None:
    _, directory = t5
    record = evaluate(config_of(directory, protocol="lm-eval"), tmp_path / "record.jsonl")
    assert record.scoring["decoder_input_ids"] == [PAD]
    behind_the_end = evaluate(config_of(directory), tmp_path / "paper.jsonl")
    assert np.abs(values(record) - values(behind_the_end))[:, :5].min() > 1e-3


def test_a_letter_keeps_its_word_start_piece_as_in_the_paper(t5: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    checkpoint, directory = t5
    first_id = AutoTokenizer.from_pretrained(checkpoint).encode
    for letters in (LATIN, ARABIC):
        found = letter_tokens(load_tokenizer(directory), letters, own_text=True)
        assert found.ids == tuple((first_id(letter)[0],) for letter in letters)
        assert found.pieces == tuple((f"\u2581{letter}",) for letter in letters)


def test_letters_without_a_token_of_their_own_are_scored_in_steps(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    """The paper's rule would read the word-start piece's logit for each of them."""
    from exporters.huggingface import export_checkpoint

    checkpoint = make_checkpoint("t5")
    drop_pieces(checkpoint / "tokenizer.json", [f"\u2581{letter}" for letter in ARABIC])
    export_checkpoint(str(checkpoint), tmp_path / "model")
    config = config_of(tmp_path / "model", letters="arabic", limit=4)
    prepared = prepare(config)
    assert list(prepared.letters.pieces[5:]) == [("\u2581", x) for x in ARABIC]
    assert any("in several steps" in note for note in prepared.notes)
    assert any("here all of the letter's tokens count" in note for note in prepared.notes)
    record = evaluate(config, tmp_path / "record.jsonl")
    expected = stepwise_log_probabilities(
        checkpoint,
        [render(q, config.template).text for q in load_questions(config).test],
        prepared.letters.ids[5:],
    )
    np.testing.assert_allclose(values(record)[:, 5:], expected, atol=1e-3)


def drop_pieces(path: Path, pieces: list[str]) -> None:
    """Take pieces out of a Unigram tokenizer.json, their ids left to pieces no text holds."""
    contents = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = contents["model"]["vocab"]
    for index, (piece, score) in enumerate(vocabulary):
        if piece in pieces:
            vocabulary[index] = [f"\ue000{index}", score]
    path.write_text(json.dumps(contents), encoding="utf-8")
    # The slow tokenizer would know them still.
    path.with_name("spiece.model").unlink()


def stepwise_log_probabilities(checkpoint: Path, texts: list[str], spellings: Any) -> Any:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt")
            row = []
            for first, second in spellings:
                given = torch.tensor([[PAD, END, first]])
                logits = model(**inputs, decoder_input_ids=given).logits[0].log_softmax(-1)
                row.append(float(logits[1, first] + logits[2, second]))
            rows.append(row)
    return np.array(rows)


# ---- what a run can and cannot ask of it


def test_a_run_says_what_the_decoder_is_given(tiny_encoder_decoder: Path) -> None:
    notes = prepare(config_of(tiny_encoder_decoder)).notes
    assert any(
        "is read behind <pad> </s> in its decoder, as the paper's code does" in n for n in notes
    )
    notes = prepare(config_of(tiny_encoder_decoder, protocol="lm-eval")).notes
    assert any("behind <pad> in its decoder, where generation begins" in n for n in notes)


def test_shared_beginnings_are_not_possible_and_change_nothing(
    tiny_encoder_decoder: Path, tmp_path: Path
) -> None:
    plain = evaluate(config_of(tiny_encoder_decoder), tmp_path / "plain.jsonl")
    notes: list[str] = []
    config = config_of(tiny_encoder_decoder, reuse="shared")
    shared = evaluate(config, tmp_path / "shared.jsonl", on_note=notes.append)
    assert any("no beginning can be shared" in note for note in notes)
    assert shared.config.reuse == "none"
    assert values(shared).tolist() == values(plain).tolist()


def test_streams_answer_as_one_does(tiny_encoder_decoder: Path, tmp_path: Path) -> None:
    one = evaluate(config_of(tiny_encoder_decoder), tmp_path / "one.jsonl")
    config = config_of(tiny_encoder_decoder, scenario="offline", threads=2)
    two = evaluate(config, tmp_path / "two.jsonl")
    np.testing.assert_allclose(values(two), values(one), rtol=1e-5, atol=1e-5)


def test_shots_stand_in_the_prompt_and_the_letter_stays_the_papers(
    tiny_encoder_decoder: Path, tmp_path: Path
) -> None:
    record = evaluate(config_of(tiny_encoder_decoder, shots=1, limit=4), tmp_path / "record.jsonl")
    assert {p.n_shots for p in record.predictions} == {1}
    without = prepare(config_of(tiny_encoder_decoder, limit=4))
    assert record.scoring["letter_ids"] == [list(ids) for ids in without.letters.ids]
    config = config_of(tiny_encoder_decoder, shots=1, limit=4)
    (_, prompt), *_ = prompts_of(config, own_text=True)
    assert prompt.text.count("Answer: ") == 2


def test_a_chat_template_is_refused_in_one_line(tiny_encoder_decoder: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    for choice in ("auto", str(template)):
        with pytest.raises(
            OptionError, match="is an encoder-decoder, which has no turns"
        ) as caught:
            prepare(config_of(tiny_encoder_decoder, chat_template=choice))
        assert "\n" not in str(caught.value)


def test_a_prompt_beyond_the_stated_length_is_asked_whole(
    t5: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, directory = t5
    config = config_of(directory, limit=4, shots=3)
    prepared = prepare(config)
    longest = prepared.asked.n_tokens.max()
    stated = read_manifest(directory).trained_length
    assert stated is not None
    assert stated < longest < 2048
    assert any("longer than the 512 tokens this model states" in n for n in prepared.notes)
    record = evaluate(config, tmp_path / "record.jsonl")
    texts = [prompt.text for _, prompt in prompts_of(config, own_text=True)]
    expected = paper_logits(checkpoint, texts, OPTION_LETTERS)
    np.testing.assert_allclose(values(record), expected, atol=1e-4 * np.abs(expected).max())


# ---- the other commands


def test_doctor_measures_the_letters_where_each_protocol_reads_them(
    t5: tuple[Path, Path],
) -> None:
    report = examine(t5[1])
    found = report["templates"]
    assert found["en-latin"]["decoder_input"] == ["<pad>", "</s>"]
    assert found["lm-eval"]["decoder_input"] == ["<pad>"]
    for letter in found["en-latin"]["letters"]:
        assert letter["agrees"]
        assert letter["in_place"] == letter["pieces"] == ("\u2581" + letter["letter"],)
    # The same head and the same letters: only where they are read differs.
    assert found["en-latin"]["letter_mass"] != pytest.approx(
        found["lm-eval"]["letter_mass"], rel=1e-3
    )
    assert report["special_tokens"]["after"] == ["</s>"]


def test_verify_finds_a_half_of_another_model(t5: tuple[Path, Path], tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper
    from test_model_dir import seal

    assert verify_directory(t5[1])["n_same_letter"] == 8
    for half in ("encoder.onnx", "decoder.onnx"):
        directory = copy_model(t5[1], tmp_path / half)
        graph = onnx.load(directory / half)
        weight = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        changed = numpy_helper.to_array(weight) * np.float32(1.5)
        weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
        (directory / half).write_bytes(graph.SerializeToString())
        with pytest.raises(ExportError, match="disagree"):
            verify_directory(seal(directory))


def test_bench_times_both_halves(tiny_encoder_decoder: Path) -> None:
    figures = measure(tiny_encoder_decoder, [16, 64], threads=1, seconds=0.2)
    assert [row["n_tokens"] for row in figures["latency"]] == [16, 64]
    assert figures["n_product_weights"] > 0


def test_quantize_rounds_the_encoder_but_not_what_its_authors_keep(
    t5: tuple[Path, Path], tmp_path: Path
) -> None:
    import onnx

    manifest = quantize(t5[1], tmp_path / "int8", "int8-fast")
    found = manifest.quantization
    assert found is not None
    assert not manifest.first_token_apart
    assert found["products"] == 3 * 5  # q, k, v, o, wi in each of three layers
    assert found["kept_fp32"] == []
    assert found["agreement"] > 0.9
    nodes = list(onnx.load(tmp_path / "int8" / "encoder.onnx", load_external_data=False).graph.node)
    rounded = [node.name for node in nodes if node.op_type == "MatMulIntegerToFloat"]
    assert len(rounded) == 15
    kept = [node.name for node in nodes if node.op_type == "MatMul" and "/wo/" in node.name]
    assert len(kept) == 3
    before, after = (d / "decoder.onnx_data" for d in (t5[1], tmp_path / "int8"))
    assert before.read_bytes() == after.read_bytes()
    record = evaluate(config_of(tmp_path / "int8"), tmp_path / "record.jsonl")
    assert record.complete
    assert record.manifest.precision == "int8-fast"


@pytest.mark.parametrize("name", ["encoder.onnx", "decoder.onnx", "lm_head.npy"])
def test_a_half_that_is_missing_is_named(
    name: str, tiny_encoder_decoder: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_encoder_decoder, tmp_path)
    (directory / name).unlink()
    with pytest.raises(ModelError, match=name):
        read_manifest(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "decoder"},
        {"kind": "triple"},
        {"kind": 1},
        {"decoder_paper_ids": []},
        {"decoder_paper_ids": [0, 10**6]},
        {"decoder_start_ids": [-1]},
        {"decoder_start_ids": ["<pad>"]},
        {"decoder_start_ids": None},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_say_how_to_ask_is_an_error(
    changes: dict[str, Any], tiny_encoder_decoder: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_encoder_decoder, tmp_path)
    edit(directory, **changes)
    with pytest.raises(ModelError, match=r"manifest\.json"):
        read_manifest(directory)


def test_a_run_goes_on_where_it_was_interrupted(tiny_encoder_decoder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_encoder_decoder, reuse="shared")
    whole = evaluate(config, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "torn.jsonl").write_bytes(b"".join(lines[:5]))
    again = evaluate(replace(config, warmup=0), tmp_path / "torn.jsonl")
    assert values(again).tolist() == values(whole).tolist()


def test_real_rows_are_scored_by_the_papers_rule(
    t5: tuple[Path, Path], real_rows: Path, tmp_path: Path
) -> None:
    checkpoint, directory = t5
    config: RunConfig = config_of(directory, data=str(real_rows), limit=30)
    record = evaluate(config, tmp_path / "record.jsonl")
    texts = [render(q, config.template).text for q in load_questions(config).test]
    expected = paper_logits(checkpoint, texts, OPTION_LETTERS)
    np.testing.assert_allclose(values(record), expected, atol=1e-4 * np.abs(expected).max())
