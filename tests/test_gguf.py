"""A GGUF file's export computes what the checkpoint that it was made of computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_eval.errors import ExportError
from edge_eval.evaluate import evaluate
from edge_eval.model import open_model
from edge_eval.model_dir import read_manifest
from edge_eval.schema import RunConfig

pytest.importorskip("torch")
from exporters.gguf import export_gguf
from exporters.huggingface import export_checkpoint


def write_gguf(checkpoint: Path, path: Path, **changes: int) -> Path:
    """A qwen3 checkpoint as llama.cpp's converter names its parts, nothing rounded."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")) | changes
    model = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    special = {"<s>", "</s>"}
    kind = gguf.TokenType
    writer.add_token_types([kind.CONTROL if t in special else kind.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 3)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def qwen(make_checkpoint: Any) -> Path:
    # transformers does not read the heads' width from a GGUF file: 128 is its default.
    folder: Path = make_checkpoint("qwen3", head_dim=128)
    return folder


def test_the_export_computes_what_the_checkpoint_computes(qwen: Path, tmp_path: Path) -> None:
    path = write_gguf(qwen, tmp_path / "tiny.gguf")
    theirs, ours = tmp_path / "checkpoint", tmp_path / "from-gguf"
    export_checkpoint(str(qwen), theirs)
    manifest = export_gguf(path, ours)
    assert (manifest.name, manifest.architecture, manifest.graph) == ("tiny", "qwen3", "fused")
    ids = np.arange(5, 305, dtype=np.int64)
    hidden = [open_model(at, read_manifest(at), 1).run(ids)[0] for at in (ours, theirs)]
    np.testing.assert_allclose(*hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(*(np.load(at / "lm_head.npy") for at in (ours, theirs)))


def test_the_export_runs(qwen: Path, tmp_path: Path) -> None:
    export_gguf(write_gguf(qwen, tmp_path / "tiny.gguf"), tmp_path / "model")
    record = evaluate(RunConfig(model=str(tmp_path / "model"), limit=8), tmp_path / "r.jsonl")
    assert {p.status.value for p in record.predictions} == {"scored"}
    assert {p.n_tokens > 50 for p in record.predictions} == {True}


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("num_hidden_layers", 0, "block_count is 0"),
        ("num_hidden_layers", 10**6, "block_count is 1000000"),
        ("intermediate_size", 10**8, "feed_forward_length is 100,000,000"),
        ("hidden_size", 10**9, "embedding_length 1,000,000,000"),
    ],
)
def test_sizes_that_do_not_fit_the_file_are_not_built(
    name: str, size: int, reason: str, qwen: Path, tmp_path: Path
) -> None:
    path = write_gguf(qwen, tmp_path / "tiny.gguf", **{name: size})
    with pytest.raises(ExportError, match=reason):
        export_gguf(path, tmp_path / "model")


def test_weights_that_are_missing_or_cut_short_leave_nothing(qwen: Path, tmp_path: Path) -> None:
    path = write_gguf(qwen, tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ExportError, match="cannot be loaded"):
        export_gguf(path, tmp_path / "models" / "model")
    assert not (tmp_path / "models").exists() or not list((tmp_path / "models").iterdir())
