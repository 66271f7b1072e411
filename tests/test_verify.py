"""A model directory that no longer computes what its checkpoint did is found out, without torch."""

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from test_model_dir import copy_model, edit, seal
from tokenizers import Tokenizer, models

from edge_eval.errors import EdgeEvalError, ExportError, ModelError
from edge_eval.letters import ARABIC, LATIN
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import RunConfig
from edge_eval.tokenization import load_tokenizer
from exporters.verify import TEMPLATES, check_letters, verification_prompts, verify_directory


def scale_table(name: str, rows: slice, factor: float) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        table = np.load(directory / name)
        table[rows] *= np.float32(factor)
        np.save(directory / name, table)

    return damage


def scale_weight(directory: Path) -> None:
    graph = onnx.load(directory / "model.onnx")
    weight = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = numpy_helper.to_array(weight) * np.float32(1.5)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    (directory / "model.onnx").write_bytes(graph.SerializeToString())


def drop_merges(directory: Path) -> None:
    contents = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    contents["model"]["merges"] = []
    (directory / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")


def test_a_fresh_export_passes_and_reports_its_figures(tiny_model: Path) -> None:
    report = verify_directory(tiny_model)
    assert report["n_prompts"] == report["n_same_letter"] == 8
    assert report["logit_max_difference"] < 1e-3 * report["logit_scale"]
    assert report["past_max_difference"] < 1e-3 * report["logit_scale"]
    assert report["precision"] == "fp32"
    assert report["letters"] == {}
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    "damage",
    [
        scale_table("lm_head.npy", slice(34, 35), 2.0),  # the letter A alone
        scale_table("lm_head.npy", slice(276, 277), np.nan),
        scale_table("embedding.npy", slice(None), 1.1),
        scale_weight,
        drop_merges,
    ],
    ids=["one head row", "a NaN", "embedding", "a weight of the graph", "tokenizer"],
)
def test_damage_behind_a_true_hash_is_found_by_computing(
    damage: Callable[[Path], None], tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    damage(directory)
    with pytest.raises(ModelError, match=r"not the file that was exported|bytes and should have"):
        verify_directory(directory)
    with pytest.raises(ExportError, match="disagree"):
        verify_directory(seal(directory))


@pytest.mark.parametrize(
    "changes",
    [{"embedding_scale": 1.5}, {"head_scale": 2.0}, {"head_softcap": 1.0}],
    ids=str,
)
def test_a_manifest_that_computes_something_else_is_found(
    changes: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    directory = seal(copy_model(tiny_model, tmp_path), **changes)
    with pytest.raises(ExportError, match="disagree"):
        verify_directory(directory)


@pytest.mark.parametrize(
    "parity",
    [
        {},
        {"letter_ids": list(range(10)), "reference_logits": [[1.0] * 10] * 3},
        {"letter_ids": [10**6] * 10, "reference_logits": [[1.0] * 10] * 8},
        {"letter_ids": "A", "reference_logits": None},
    ],
    ids=["none", "three prompts", "ids beyond the head", "other types"],
)
def test_a_manifest_without_usable_reference_logits_is_named(
    parity: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    edit(directory, parity=parity)
    with pytest.raises(EdgeEvalError, match=r"manifest\.json|head"):
        verify_directory(directory)


# ---- the prompts it asks


def test_eight_prompts_are_asked_in_every_template(tiny_model: Path) -> None:
    prompts = verification_prompts(load_tokenizer(tiny_model), None, 1024)
    questions = {q.id: q for q in load_questions(RunConfig()).test}
    assert len({prompt.question_id for prompt in prompts}) == 8
    for prompt, template in zip(prompts, cycle(TEMPLATES), strict=False):
        assert prompt == render(questions[prompt.question_id], template)


def test_the_last_prompt_reaches_beyond_a_window_but_not_beyond_the_model(
    tiny_model: Path,
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    for window, max_length in ((48, 1024), (400, 1024), (400, 450), (1024, 1024)):
        prompts = verification_prompts(tokenizer, window, max_length)
        lengths = [len(tokenizer.encode(prompt.text).ids) for prompt in prompts]
        assert max(lengths) <= max_length
        if window + 64 < max_length // 2:
            assert lengths[-1] > window + 64


# ---- the letters


def test_letters_that_come_back_leave_no_finding(tiny_model: Path) -> None:
    assert check_letters(load_tokenizer(tiny_model)) == {}


def silent(*known: str) -> Tokenizer:
    """A tokenizer that says nothing at all for what it does not know."""
    return Tokenizer(models.BPE({piece: index for index, piece in enumerate(known)}, []))


def test_a_vocabulary_without_arabic_letters_is_told_and_no_fault() -> None:
    findings = check_letters(silent(*LATIN))
    assert set(findings) == set(ARABIC)
    assert "U+0647" in findings[ARABIC[4]]


def test_a_vocabulary_without_latin_letters_is_not_this_models() -> None:
    with pytest.raises(ExportError, match="none of the letters A-E"):
        check_letters(silent(*ARABIC))
