"""A stranger's checkpoint: nothing of it runs, nothing outside its folder is read or written."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from edge_eval.errors import ExportError, ModelError

pytest.importorskip("torch")
from exporters.checkpoint import open_checkpoint, read_json
from exporters.huggingface import export_checkpoint, load_causal_model
from exporters.settings import clean_config, tokenizer_classes


@pytest.fixture
def llama(make_checkpoint: Any) -> Path:
    folder: Path = make_checkpoint("llama")
    return folder


def edit(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(fields | changes), encoding="utf-8")


@pytest.fixture
def code_elsewhere(tmp_path: Path) -> tuple[Path, Path]:
    """A folder whose configuration is code, and the file that appears when it runs."""
    folder, ran = tmp_path / "elsewhere", tmp_path / "ran"
    folder.mkdir()
    edit(folder / "config.json", model_type="odd", auto_map={"AutoConfig": "odd.OddConfig"})
    (folder / "odd.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\n"
        "class OddConfig(PretrainedConfig):\n    model_type = 'odd'\n",
        encoding="utf-8",
    )
    return folder, ran


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("trust", [True, False])
def test_code_that_a_nested_config_names_does_not_run(
    trust: bool, inside: bool, llama: Path, code_elsewhere: tuple[Path, Path], tmp_path: Path
) -> None:
    """CVE-2026-5241: transformers below 5.5 takes trust_remote_code from the checkpoint."""
    folder, ran = code_elsewhere
    config = {
        "model_type": "lightglue",
        "trust_remote_code": trust,
        "keypoint_detector_config": {"model_type": "odd", "_name_or_path": str(folder)},
    }
    if inside:
        config = {"model_type": "gemma3", "text_config": config}
    (llama / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in llama.glob("tokenizer_config.json"):
        path.unlink()  # without it transformers looks into config.json for the tokenizer too
    with pytest.raises(ExportError, match=r"code of its own|architecture 'lightglue'"):
        export_checkpoint(str(llama), tmp_path / "model")
    assert not ran.exists()


@pytest.mark.parametrize("where", [{}, {"rope_scaling": {}}, {"layers": [{"deep": [{}]}]}], ids=str)
def test_a_wish_to_run_code_is_found_at_any_depth(where: dict[str, Any], llama: Path) -> None:
    part = where
    while part:
        inner = next(iter(part.values()))
        part = inner[0] if isinstance(inner, list) else inner
    part["auto_map"] = {"AutoConfig": "odd.OddConfig"}
    edit(llama / "config.json", **where)
    with pytest.raises(ExportError, match=r"auto_map in config\.json"), open_checkpoint(str(llama)):
        pass


def test_chat_templates_are_no_file_names(llama: Path, tmp_path: Path) -> None:
    """CVE-2026-9856: transformers below 5.10 writes NAME.jinja wherever the name leads."""
    edit(
        llama / "tokenizer_config.json",
        chat_template=[
            {"name": "default", "template": "{{ messages[0].content }}"},
            {"name": str(tmp_path / "written"), "template": "elsewhere"},
            "no template",
        ],
    )
    export_checkpoint(str(llama), tmp_path / "model")
    assert not list(tmp_path.glob("written*"))
    template = (tmp_path / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    assert template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    "name",
    ["_attn_implementation", "_attn_implementation_internal", "attn_implementation"],
)
def test_the_implementation_is_ours_to_choose(name: str, llama: Path) -> None:
    """CVE-2026-4372: a repository named there is a kernel to fetch and run."""
    edit(llama / "config.json", **{name: "nobody/kernel"})
    with open_checkpoint(str(llama)) as checkpoint:
        model = load_causal_model(checkpoint.folder)
    assert model.config._attn_implementation == "eager"


def test_weights_outside_the_folder_are_not_read(llama: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(llama / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
    (llama / "model.safetensors").rename(tmp_path / "private.safetensors")
    for path in ("../private.safetensors", str(tmp_path / "private.safetensors"), None, ["x"]):
        index = {"weight_map": dict.fromkeys(names, path)}
        (llama / "other.safetensors").write_bytes(b"")
        (llama / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises(ExportError, match="names weights that are not in the folder"):
            export_checkpoint(str(llama), tmp_path / "model")


def test_vocabularies_outside_the_folder_are_not_read(llama: Path, tmp_path: Path) -> None:
    private = tmp_path / "private.json"
    private.write_text('{"secret": 0}', encoding="utf-8")
    edit(llama / "tokenizer_config.json", vocab_file=str(private), tokenizer_file=str(private))
    with open_checkpoint(str(llama)) as checkpoint:
        settings = (checkpoint.folder / "tokenizer_config.json").read_text(encoding="utf-8")
    assert "private" not in settings


def test_only_weights_and_vocabularies_are_seen(llama: Path) -> None:
    before = {path.name for path in llama.iterdir()}
    for name in ("modeling_odd.py", "generation_config.json", "vocab.pkl", "extra.safetensors.py"):
        (llama / name).write_text("{}", encoding="utf-8")
    (llama / "folder.model").mkdir()
    with open_checkpoint(str(llama)) as checkpoint:
        assert {path.name for path in checkpoint.folder.iterdir()} == before - {
            "generation_config.json"
        }
    assert not checkpoint.folder.exists()
    assert (llama / "model.safetensors").is_file()


def test_links_out_of_the_folder_are_not_followed(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}", encoding="utf-8")
    for name in ("chat_template.jinja", "vocab.json", "added_tokens.json"):
        (llama / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ExportError, match=rf"{name} points outside its folder"):
            export_checkpoint(str(llama), tmp_path / "model")
        (llama / name).unlink()
    weights = (llama / "model.safetensors").rename(tmp_path / "model.safetensors")
    (llama / "model.safetensors").symlink_to(weights)
    with pytest.raises(ExportError, match=r"model.safetensors points outside"):
        export_checkpoint(str(llama), tmp_path / "model")


def test_a_folder_called_snapshots_is_no_cache(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    folder = llama.rename(tmp_path / "snapshots" / "model")
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ExportError, match="points outside its folder"):
        export_checkpoint(str(folder), tmp_path / "out")


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json"])
def test_tokens_nested_without_end_are_one_line(file: str, llama: Path) -> None:
    (llama / file).write_text('{"a":' * 300 + "1" + "}" * 300, encoding="utf-8")
    with pytest.raises(ExportError, match="nested over 64 deep"):
        export_checkpoint(str(llama), llama / "model")


def test_the_hubs_cache_is_links_within_a_repository(llama: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--tiny"
    snapshot, blobs = repository / "snapshots" / "0", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in llama.iterdir():
        (snapshot / path.name).symlink_to(path.rename(blobs / path.name))
    with open_checkpoint(str(snapshot)) as checkpoint:
        assert (checkpoint.folder / "model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": True},
        {"vocab_size": 10**8},
        {"vocab_size": 10**6},
        {"vocab_size": 10**400},
        {"vocab_size": 285.5},
        {"hidden_size": [64]},
        {"intermediate_size": 10**7},
        {"num_attention_heads": -1},
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_the_weights_are_refused_before_they_are_built(
    change: dict[str, Any], llama: Path
) -> None:
    edit(llama / "config.json", **change)
    with pytest.raises(ExportError, match=r"in config\.json is .* does not fit") as found:
        export_checkpoint(str(llama), llama / "model")
    assert len(str(found.value)) < 400


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"rope_scaling": "abc"},
        {"rope_scaling": {"rope_type": ["a"]}},
        {"hidden_act": ["silu"]},
    ],
    ids=str,
)
def test_settings_of_other_kinds_are_one_line(change: dict[str, Any], llama: Path) -> None:
    edit(llama / "config.json", **change)
    with pytest.raises(ExportError, match="cannot be loaded by transformers"):
        export_checkpoint(str(llama), llama / "model")


@pytest.mark.parametrize("name", ["rms_norm_eps", "pad_token_id", "rope_theta", "sliding_window"])
def test_what_is_to_be_a_number_is_one(name: str, llama: Path) -> None:
    edit(llama / "config.json", **{name: "a"})
    with pytest.raises(ExportError, match=rf"{name} in config\.json is a, no number"):
        export_checkpoint(str(llama), llama / "model")


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_weights": "/dev/zero.safetensors"},
        {"attribute_map": {"vocab_size": "to_dict"}},
        {"to_dict": "x"},
        {"__class__": "x"},
        {"num_labels": 10**9},
        {"sub_configs": 5},
    ],
    ids=str,
)
def test_names_that_are_no_settings_change_nothing(change: dict[str, Any], llama: Path) -> None:
    edit(llama / "config.json", **change)
    with open_checkpoint(str(llama)) as checkpoint:
        model = load_causal_model(checkpoint.folder)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_a_quantised_checkpoint_is_refused(llama: Path) -> None:
    edit(llama / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ExportError, match="quantised already"):
        export_checkpoint(str(llama), llama / "model")


@pytest.mark.parametrize(
    "name", ["AutoModel", "AutoTokenizer", "RagTokenizer", "MarianTokenizer", "pipeline", 5, ["x"]]
)
def test_a_tokenizers_class_is_a_language_models(name: Any, llama: Path) -> None:
    edit(llama / "tokenizer_config.json", tokenizer_class=name, vocab="/dev/zero")
    with pytest.raises(ExportError, match="which is no tokenizer of the language models"):
        export_checkpoint(str(llama), llama / "model")


def test_extra_tokens_are_no_methods(llama: Path, tmp_path: Path) -> None:
    extra = {"is_fast": "A", "save_pretrained": "B", "__class__": "C", "image_token": "D"}
    edit(llama / "tokenizer_config.json", extra_special_tokens=extra)
    export_checkpoint(str(llama), tmp_path / "model")
    settings = (tmp_path / "model" / "tokenizer_config.json").read_text(encoding="utf-8")
    assert "image_token" in settings
    assert "save_pretrained" not in settings


def test_a_tokenizers_class_may_stand_in_either_file(llama: Path) -> None:
    edit(llama / "config.json", tokenizer_class="AutoModel")
    with pytest.raises(ExportError, match=r"config\.json wants a 'AutoModel'"):
        export_checkpoint(str(llama), llama / "model")


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {  # bytes of weights, and settings
    "Qwen2.5 0.5B": (
        988_097_824,
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Llama 3.2 1B": (
        2_471_645_608,
        {
            "model_type": "llama",
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pad_token_id": None,
            "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "vocab_size": 128256,
        },
    ),
    "GPT-2": (
        548_105_171,
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_inner": None,
            "n_layer": 12,
            "n_positions": 1024,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
    ),
    "mT5 small": (
        1_200_729_512,
        {
            "model_type": "mt5",
            "d_ff": 1024,
            "d_kv": 64,
            "d_model": 512,
            "is_encoder_decoder": True,
            "num_decoder_layers": 8,
            "num_heads": 6,
            "num_layers": 8,
            "tokenizer_class": "T5Tokenizer",
            "vocab_size": 250112,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_stay_as_they_are(name: str) -> None:
    weight_bytes, config = PUBLISHED[name]
    assert clean_config(name, config, weight_bytes) == config


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_published_tokenizers_classes_are_known(name: str) -> None:
    assert {name, f"{name}Fast"} & tokenizer_classes()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"additional_special_tokens": ["y" * 200_000]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "x" * 200_000}}}),
        ("tokenizer_config.json", {"additional_special_tokens": list(map(str, range(200_000)))}),
        ("special_tokens_map.json", {"bos_token": "x" * 200_000}),
        ("added_tokens.json", {"x" * 200_000: 5}),
    ],
    ids=str,
)
def test_tokens_that_take_hours_to_add_are_refused(
    file: str, content: dict[str, Any], llama: Path
) -> None:
    edit(llama / file, **content)
    with pytest.raises(ExportError, match="Do not trust this model"):
        export_checkpoint(str(llama), llama / "model")


def test_half_a_surrogate_pair_in_a_setting_is_no_obstacle(llama: Path) -> None:
    edit(llama / "config.json", remark="\ud800")
    with open_checkpoint(str(llama)) as checkpoint:
        assert checkpoint.config["remark"] == "\ud800"


def test_settings_that_are_no_file_or_have_no_end_are_not_read(llama: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        kept = (llama / name).read_bytes()
        with (llama / name).open("wb") as file:
            file.truncate(3 << 30)  # nothing but a size: no byte of it is on disk
        with pytest.raises(ExportError, match="cannot be read as JSON: it is no file, or over"):
            export_checkpoint(str(llama), llama / "model")
        (llama / name).unlink()
        os.mkfifo(llama / name)
        with pytest.raises(ExportError, match=r"no config\.json|cannot be read as JSON"):
            read_json(llama / name)
        (llama / name).unlink()
        (llama / name).write_bytes(kept)


@pytest.mark.parametrize(
    "source", ["C:\\models/x", "a b/c d", "foo/..", "evil:x/y", "x" * 5000, "x/" + "y" * 300, "\0"]
)
def test_what_is_neither_a_path_nor_a_hub_id_is_one_line(source: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="neither a folder nor"):
        export_checkpoint(source, tmp_path / "model")


def test_an_adapter_is_told_from_a_model(llama: Path) -> None:
    edit(llama / "adapter_config.json", base_model_name_or_path="someone/model")
    with pytest.raises(ExportError, match="merge it into its base model"):
        export_checkpoint(str(llama), llama / "model")


def test_a_tokenizer_that_takes_hours_is_refused_before_it_is_read(llama: Path) -> None:
    token = {"id": 0, "content": "x" * 5000, "special": False}
    edit(llama / "tokenizer.json", added_tokens=[token])
    with pytest.raises(ModelError, match="Do not trust"):
        export_checkpoint(str(llama), llama / "model")


@pytest.mark.parametrize("depth", [200, 100_000])
def test_settings_nested_without_end_are_one_line(depth: int, llama: Path) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    (llama / "config.json").write_text(
        '{"model_type": "llama", "deep": ' + nested + "}", encoding="utf-8"
    )
    with pytest.raises(ExportError, match=r"nested over 64 deep|cannot be read as JSON") as found:
        export_checkpoint(str(llama), llama / "model")
    assert "\n" not in str(found.value)


def test_a_language_model_is_known_by_its_architecture(llama: Path) -> None:
    for change in ({"model_type": None}, {"model_type": "siglip"}, {"model_type": ["llama"]}):
        edit(llama / "config.json", **change)
        with pytest.raises(ExportError, match="cannot be exported"):
            export_checkpoint(str(llama), llama / "model")
    edit(llama / "config.json", model_type="gemma3", vision_config={"model_type": "siglip"})
    with pytest.raises(ExportError, match="has in it, a network of architecture 'siglip'"):
        export_checkpoint(str(llama), llama / "model")


def test_a_length_is_a_number_or_none(llama: Path) -> None:
    for length in (None, 10**30, 1e30, 2048):
        edit(llama / "tokenizer_config.json", model_max_length=length)
        with open_checkpoint(str(llama)):
            pass
    edit(llama / "tokenizer_config.json", model_max_length="abc")
    with pytest.raises(ExportError, match="model_max_length"), open_checkpoint(str(llama)):
        pass


def test_an_error_names_the_checkpoint_and_not_its_copy(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"\0" * 100_000)
    with pytest.raises(ExportError, match="cannot be loaded") as found:
        export_checkpoint(str(llama), llama / "model")
    assert str(llama) in str(found.value)
    assert tempfile.gettempdir() not in str(found.value).replace(str(llama), "")
