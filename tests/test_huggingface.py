"""Checkpoints become model directories that compute what torch computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ARCHITECTURES, ENCODER_DECODERS, SLIDING, TINY

from edge_eval.errors import ExportError
from edge_eval.model import open_model
from edge_eval.model_dir import read_manifest, verify_hashes
from exporters.huggingface import export_checkpoint

pytest.importorskip("torch", reason="checkpoints are made with torch, of the export extra")
from exporters.fused_decoder import FAMILIES

# Warnings of the exporters themselves are silenced where they are called (quiet()).
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def torch_logits(
    checkpoint: Path, input_ids: list[int], decoder_input_ids: list[int] | None = None
) -> np.ndarray[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto: Any = AutoModelForSeq2SeqLM if decoder_input_ids else AutoModelForCausalLM
    model = auto.from_pretrained(checkpoint, attn_implementation="eager").eval()
    given = {"decoder_input_ids": torch.tensor([decoder_input_ids])} if decoder_input_ids else {}
    with torch.no_grad():
        logits: np.ndarray[Any, Any] = (
            model(torch.tensor([input_ids]), **given).logits[0, -1].numpy()
        )
    return logits


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_an_export_computes_what_torch_computes(
    model_type: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(model_type)
    export_checkpoint(str(checkpoint), tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    assert manifest.graph == ("fused" if model_type in FAMILIES else "plain")
    model = open_model(tmp_path / "model", manifest, threads=1)
    rng = np.random.default_rng(0)
    for n in (1, 7, 120):  # 120 is beyond the windows of 48
        input_ids = rng.integers(2, manifest.vocab_size, n)
        expected = torch_logits(checkpoint, input_ids.tolist())
        scale = np.abs(expected).max()
        hidden, _ = model.run(input_ids)
        np.testing.assert_allclose(model.all_logits(hidden), expected, atol=2e-4 * scale)
        some = model.head_rows([5, 3, 5])
        np.testing.assert_allclose(
            model.logits(hidden, some), expected[[5, 3, 5]], atol=2e-4 * scale
        )
        if n > 1:
            _, past = model.run(input_ids[: n // 3], keep=True)
            _, past = model.run(input_ids[n // 3 : n // 2 + 1], past, keep=True)
            rest = input_ids[n // 2 + 1 :]
            if len(rest):
                continued, _ = model.run(rest, past)
                np.testing.assert_allclose(continued, hidden, atol=2e-4 * np.abs(hidden).max())


@pytest.mark.parametrize("model_type", sorted(ENCODER_DECODERS))
def test_an_encoder_decoder_computes_what_torch_computes(
    model_type: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(model_type)
    export_checkpoint(str(checkpoint), tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    assert manifest.kind == "encoder-decoder"
    assert manifest.tied_embedding == (model_type == "t5")
    assert manifest.head_scale == (64**-0.5 if model_type == "t5" else 1.0)
    assert manifest.trained_length == (512 if model_type == "t5" else None)
    assert manifest.max_length == 2048
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"encoder.onnx", "decoder.onnx", "lm_head.npy"} <= files
    assert "model.onnx" not in files
    model = open_model(tmp_path / "model", manifest, threads=1)
    rng = np.random.default_rng(0)
    for n in (1, 7, 300):  # 300 is beyond the last bucket of relative positions
        input_ids = rng.integers(2, manifest.vocab_size, n)
        for given in ([0], [0, 1], [0, 7, 8, 9]):
            expected = torch_logits(checkpoint, input_ids.tolist(), given)
            scale = np.abs(expected).max()
            hidden, _ = model.answering_behind(given).run(input_ids)
            np.testing.assert_allclose(model.all_logits(hidden), expected, atol=2e-4 * scale)
            _, past = model.answering_behind(given[:1]).run(input_ids, keep=True)
            if len(given) > 1:
                continued, _ = model.run(np.array(given[1:]), past, keep=True)
                np.testing.assert_allclose(continued, hidden, atol=2e-4 * np.abs(hidden).max())


def test_another_encoder_decoder_is_refused_before_it_is_loaded(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("t5")
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace('"model_type": "t5"', '"model_type": "bart"'))
    with pytest.raises(ExportError, match=r"architecture 'bart'.*like T5 and mT5"):
        export_checkpoint(str(checkpoint), tmp_path / "model")


@pytest.mark.parametrize("model_type", ["llama", "mt5"])
def test_weights_that_are_missing_are_not_made_up(
    model_type: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = make_checkpoint(model_type)
    weights = load_file(checkpoint / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=r"lacks 1 of the weights .*lm_head\.weight"):
        export_checkpoint(str(checkpoint), tmp_path / "model")


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_plain_graph_of_a_fused_family_computes_the_same(
    model_type: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(model_type)
    manifest = export_checkpoint(str(checkpoint), tmp_path / "model", fused=False)
    assert manifest.graph == "plain"
    model = open_model(tmp_path / "model", manifest, threads=1)
    input_ids = np.random.default_rng(1).integers(2, manifest.vocab_size, 90)
    expected = torch_logits(checkpoint, input_ids.tolist())
    logits = model.all_logits(model.run(input_ids)[0])
    np.testing.assert_allclose(logits, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu"},
        {"head_dim": 8},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
    ids=str,
)
def test_settings_that_change_the_network_are_kept(
    changes: dict[str, Any], make_checkpoint: Any, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("llama", **changes)
    manifest = export_checkpoint(str(checkpoint), tmp_path / "model")
    model = open_model(tmp_path / "model", manifest, threads=1)
    input_ids = np.random.default_rng(2).integers(2, manifest.vocab_size, 100)
    expected = torch_logits(checkpoint, input_ids.tolist())
    logits = model.all_logits(model.run(input_ids)[0])
    np.testing.assert_allclose(logits, expected, atol=2e-4 * np.abs(expected).max())
    assert manifest.tied_embedding == changes.get("tie_word_embeddings", False)


def test_every_file_of_a_model_directory_is_in_its_manifest(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    on_disk = {path.name for path in tiny_model.iterdir()} - {"manifest.json"}
    assert on_disk == set(manifest.files)
    verify_hashes(tiny_model, manifest)


def test_the_manifest_keeps_the_parity_that_was_found(tiny_model: Path) -> None:
    parity = read_manifest(tiny_model).parity
    assert parity["n_prompts"] == parity["n_same_letter"] == 8
    assert parity["logit_max_difference"] < 1e-3 * parity["logit_scale"]
    assert len(parity["reference_logits"]) == 8


def test_a_window_is_verified_beyond_its_length(make_checkpoint: Any, tmp_path: Path) -> None:
    manifest = export_checkpoint(str(make_checkpoint("gemma3_text")), tmp_path / "model")
    assert manifest.sliding_window == SLIDING["sliding_window"]
    assert manifest.parity["longest_tokens"] > SLIDING["sliding_window"] + 64


def test_an_existing_output_is_left_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ExportError, match="exists already"):
        export_checkpoint(str(tiny_checkpoint), tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pickles",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100_000),
            "cannot be loaded",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "no tokenizer"),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "evil.Evil"}})
            ),
            "runs no\\s+code",
        ),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": "new"})),
            "architecture 'new', which cannot be exported",
        ),
    ],
    ids=["no config", "no weights", "pickles", "broken weights", "no tokenizer", "code", "unknown"],
)
def test_a_checkpoint_that_cannot_be_exported_leaves_nothing(
    damage: Any, message: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("llama")
    damage(checkpoint)
    with pytest.raises(ExportError, match=message):
        export_checkpoint(str(checkpoint), tmp_path / "models" / "model")
    assert not (tmp_path / "models").exists() or not list((tmp_path / "models").iterdir())


def test_weights_that_do_not_survive_are_refused(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graph of another network under this one's name: what verification is for.
    import exporters.fused_decoder as fused

    monkeypatch.setattr(
        fused, "FAMILIES", fused.FAMILIES | {"llama": fused.Family(norm_offset=0.5)}
    )
    with pytest.raises(ExportError, match="disagree"):
        export_checkpoint(str(make_checkpoint("llama")), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_nowhere_is_told_apart_from_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="neither a folder nor"):
        export_checkpoint(str(tmp_path / "nothing"), tmp_path / "model")


def test_a_cached_hub_checkpoint_exports_offline(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    revision = "0" * 39 + "1"
    cache = tmp_path / "cache"
    snapshot = cache / "models--someone--tiny" / "snapshots" / revision
    shutil.copytree(tiny_checkpoint, snapshot)
    refs = cache / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(cache))
    manifest = export_checkpoint("someone/tiny", tmp_path / "model")
    assert (manifest.name, manifest.revision) == ("someone/tiny", revision)
    with pytest.raises(ExportError, match="cannot be reached and someone/other"):
        export_checkpoint("someone/other", tmp_path / "other")


def test_the_tiny_shapes_have_grouped_heads() -> None:
    assert TINY["num_attention_heads"] > TINY["num_key_value_heads"]
