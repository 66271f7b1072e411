"""An ONNX folder as others make it gives the predictions of our own export of its checkpoint."""

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from test_cli import invoke
from test_evaluate import config_of, values
from test_model import SEVERAL, SINGLE

from edge_eval.errors import EdgeEvalError, ModelError, OptionError, RecordError
from edge_eval.evaluate import evaluate
from edge_eval.model import LetterModel, letter_reader
from edge_eval.model_dir import sha256_of
from edge_eval.onnx_folder import describe_folder, open_any_model, read_any_manifest
from edge_eval.run_record import read_record
from edge_eval.schema import RunRecord

onnx = pytest.importorskip("onnx", reason="graphs are changed with onnx, of the export extra")

# Of the smallest of each kind: tied and untied head, soft cap, learned positions, biases.
FAMILIES = ("llama", "gemma2", "gpt2")


# Two layers are enough for another's graph. Gemma 2's export by optimum 0.1 loses the cap of its
# attention, without a word.
SMALLER: dict[str, dict[str, Any]] = {
    "gemma2": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": None,
    },
    "gpt2": {"n_layer": 2},
}


def export_by_optimum(checkpoint: Path, folder: Path, *, past: bool = True) -> None:
    """Exports a checkpoint as optimum's own command does."""
    from optimum.exporters.onnx import main_export

    from exporters.huggingface import quiet

    task = "text-generation-with-past" if past else "text-generation"
    with quiet():
        main_export(str(checkpoint), folder, task=task, do_validation=False)


@pytest.fixture(scope="session")
def pairs(
    request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], keep: Callable[..., Path]
) -> Callable[[str], tuple[Path, Path]]:
    """A family's ONNX folder by optimum, with past, and our own export of the same checkpoint."""
    from exporters.huggingface import export_checkpoint

    @cache
    def checkpoint(family: str) -> Path:
        if family == "llama":
            return cast("Path", request.getfixturevalue("tiny_checkpoint"))
        return make_checkpoint(family, **SMALLER[family])

    def pair(family: str) -> tuple[Path, Path]:
        return (
            keep(f"onnx-{family}", lambda output: export_by_optimum(checkpoint(family), output)),
            keep(
                f"tiny-{family}", lambda output: export_checkpoint(str(checkpoint(family)), output)
            ),
        )

    return pair


@pytest.fixture(scope="session")
def llama(pairs: Callable[[str], tuple[Path, Path]]) -> Path:
    return pairs("llama")[0]


@pytest.fixture(scope="session")
def without_past(request: pytest.FixtureRequest, keep: Callable[..., Path]) -> Path:
    def make(output: Path) -> None:
        export_by_optimum(request.getfixturevalue("tiny_checkpoint"), output, past=False)

    return keep("onnx-without-past", make)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunRecord]:
    def run(folder: Path, name: str = "record", **settings: Any) -> RunRecord:
        return evaluate(config_of(folder, **settings), tmp_path / f"{name}.jsonl")

    return run


def open_folder(folder: Path, file: str = "", threads: int = 1) -> LetterModel:
    return open_any_model(folder, read_any_manifest(folder, file), threads)


def copy_folder(
    folder: Path, target: Path, change: Callable[[Any], Any] | None = None, **settings: Any
) -> Path:
    """A copy of an ONNX folder with its graph and its configuration changed."""
    copy = Path(shutil.copytree(folder, target / "copy"))
    if change is not None:
        graph = onnx.load(copy / "model.onnx")
        graph = change(graph) or graph
        (copy / "model.onnx").write_bytes(graph.SerializeToString())
    if settings:
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    return copy


def assert_same_answers(found: RunRecord, expected: RunRecord, within: float = 1e-4) -> None:
    assert found.complete
    scale = np.nanmax(np.abs(values(expected)))
    np.testing.assert_allclose(values(found), values(expected), atol=within * scale)
    answers = [(p.question_id, p.status, p.n_tokens) for p in expected.predictions]
    assert [(p.question_id, p.status, p.n_tokens) for p in found.predictions] == answers
    assert [p.predicted for p in found.predictions] == [p.predicted for p in expected.predictions]


# ---- the same predictions


@pytest.mark.parametrize("family", FAMILIES)
def test_optimums_export_answers_as_our_own_does(
    family: str, pairs: Callable[[str], tuple[Path, Path]], run: Callable[..., RunRecord]
) -> None:
    folder, model = pairs(family)
    assert_same_answers(run(folder, "theirs"), run(model, "ours"))


@pytest.mark.parametrize(
    "settings",
    [
        {"protocol": "oall"},
        {"prompt": "ar", "letters": "arabic", "shots": 1, "allow_fewer_shots": True},
        {"reuse": "shared"},
        {"scenario": "offline", "threads": 2},
        {"permute": True, "limit": 4},
    ],
    ids=["log-probabilities", "shots", "shared", "offline", "rotated"],
)
def test_every_way_to_run_gives_what_a_model_directory_gives(
    settings: dict[str, Any],
    llama: Path,
    without_past: Path,
    tiny_model: Path,
    run: Callable[..., RunRecord],
) -> None:
    expected = run(tiny_model, "ours", **settings)
    assert_same_answers(run(llama, "with", **settings), expected)
    if settings.get("reuse") != "shared":
        assert_same_answers(run(without_past, "without", **settings), expected)


@pytest.mark.parametrize("past", [True, False], ids=["with past", "without past"])
def test_letters_of_several_tokens_and_continued_prompts_are_the_same(
    past: bool, llama: Path, without_past: Path, tiny_model: Path
) -> None:
    ids = np.random.default_rng(0).integers(2, 600, 40)
    model = open_folder(llama if past else without_past)
    assert model.continues == past
    for letters in (SINGLE, SEVERAL):
        expected = letter_reader(open_folder(tiny_model), letters).read(ids).values
        reader = letter_reader(model, letters)
        np.testing.assert_allclose(reader.read(ids).values, expected, rtol=1e-4, atol=1e-4)
        _, kept = model.run(ids[:15], keep=True)
        continued = reader.read(ids[15:], kept).values
        np.testing.assert_allclose(continued, expected, rtol=1e-4, atol=1e-4)


def test_beginnings_cannot_be_shared_without_a_past(
    without_past: Path, run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="--reuse none"):
        run(without_past, reuse="shared")
    assert not (tmp_path / "record.jsonl").exists()


# ---- graphs of other makers


def value_of(graph: Any, name: str) -> Any:
    return next(v for v in [*graph.graph.input, *graph.graph.output] if v.name == name)


def insert_cast(graph: Any, name: str, to: int, *, at_end: bool) -> None:
    """Give an input or an output another type, with a cast between it and the rest."""
    inner = f"{name}.inner"
    for node in graph.graph.node:
        for names in (node.input, node.output):
            names[:] = [inner if n == name else n for n in names]
    before = value_of(graph, name).type.tensor_type.elem_type
    value_of(graph, name).type.tensor_type.elem_type = to
    ends = (inner, name) if at_end else (name, inner)
    node = onnx.helper.make_node("Cast", [ends[0]], [ends[1]], to=to if at_end else before)
    graph.graph.node.insert(len(graph.graph.node) if at_end else 0, node)


def int32_inputs(graph: Any) -> None:
    for name in ("input_ids", "attention_mask", "position_ids"):
        if any(value.name == name for value in graph.graph.input):
            insert_cast(graph, name, onnx.TensorProto.INT32, at_end=False)


def fp16_ends(graph: Any) -> None:
    for value in list(graph.graph.input):
        if value.name.startswith("past"):
            insert_cast(graph, value.name, onnx.TensorProto.FLOAT16, at_end=False)
    for value in list(graph.graph.output):
        insert_cast(graph, value.name, onnx.TensorProto.FLOAT16, at_end=True)


def before_head(graph: Any) -> Any:
    """The product that makes the logits."""
    return next(node for node in graph.graph.node if "logits" in node.output)


def add_numbers(graph: Any, **tensors: Any) -> None:
    for name, number in tensors.items():
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(number), name))


def last_position_only(graph: Any) -> None:
    """As the builder's prune_lm_head does: a slice in front of the head."""
    head = before_head(graph)
    add_numbers(graph, start=np.array([-1]), end=np.array([2**31]), axis=np.array([1]))
    cut = onnx.helper.make_node("Slice", [head.input[0], "start", "end", "axis"], ["last"])
    graph.graph.node.insert(list(graph.graph.node).index(head), cut)
    head.input[0] = "last"
    value_of(graph, "logits").type.tensor_type.shape.dim[1].dim_value = 1


def without_positions(graph: Any) -> None:
    """Logits (batch, vocab): the last position gathered, its axis gone."""
    head = before_head(graph)
    add_numbers(graph, last=np.array(-1))
    head.output[0] = "all_logits"
    gather = onnx.helper.make_node("Gather", ["all_logits", "last"], ["logits"], axis=1)
    graph.graph.node.append(gather)
    del value_of(graph, "logits").type.tensor_type.shape.dim[1]


def logits_to_keep(graph: Any) -> None:
    """As newer exports for browsers have it: how many positions is an input, a scalar."""
    head = before_head(graph)
    add_numbers(graph, end=np.array([2**31]), axis=np.array([1]), flat=np.array([-1]))
    name = "num_logits_to_keep"
    graph.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, []))
    nodes = [
        onnx.helper.make_node("Neg", [name], ["from_end"]),
        onnx.helper.make_node("Reshape", ["from_end", "flat"], ["start"]),
        onnx.helper.make_node("Slice", [head.input[0], "start", "end", "axis"], ["kept"]),
    ]
    at = list(graph.graph.node).index(head)
    for offset, node in enumerate(nodes):
        graph.graph.node.insert(at + offset, node)
    head.input[0] = "kept"


def token_types(graph: Any) -> None:
    """Token types that shift the embedded tokens, unless they are 0."""
    shape, name = ["batch_size", "sequence_length"], "token_type_ids"
    graph.graph.input.append(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
    )
    lookup = next(node for node in graph.graph.node if node.op_type == "Gather")
    embedded, lookup.output[0] = lookup.output[0], "looked_up"
    add_numbers(graph, hundred=np.array(100, np.float32), behind=np.array([-1]))
    nodes = [
        onnx.helper.make_node("Unsqueeze", [name, "behind"], ["column"]),
        onnx.helper.make_node("Cast", ["column"], ["shift"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Mul", ["shift", "hundred"], ["large"]),
        onnx.helper.make_node("Add", ["looked_up", "large"], [embedded]),
    ]
    at = list(graph.graph.node).index(lookup)
    for offset, node in enumerate(nodes, start=1):
        graph.graph.node.insert(at + offset, node)


def merged(graph: Any) -> Any:
    """The decoder in two branches, by optimum's own merging; the first ignores the past."""
    optimum = pytest.importorskip("optimum.onnx", reason="it merges, of the export extra")
    first = onnx.ModelProto()
    first.CopyFrom(graph)
    pasts = [value for value in first.graph.input if value.name.startswith("past")]
    for value in pasts:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        empty = np.zeros((1, shape[1], 0, shape[3]), np.float32)
        first.graph.initializer.append(onnx.numpy_helper.from_array(empty, value.name))
        first.graph.input.remove(value)
    with tempfile.TemporaryDirectory() as scratch:
        return optimum.merge_decoders(first, graph, save_path=Path(scratch) / "merged.onnx")


def forgetful(graph: Any) -> None:
    """A past that is read and not heeded: what a faulty export with past looks like."""
    add_numbers(graph, nothing=np.array(0, np.float32))
    for value in [v for v in graph.graph.input if v.name.endswith("value")]:
        for node in graph.graph.node:
            node.input[:] = [f"{value.name}.off" if n == value.name else n for n in node.input]
        node = onnx.helper.make_node("Mul", [value.name, "nothing"], [f"{value.name}.off"])
        graph.graph.node.insert(0, node)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "int32 inputs": int32_inputs,
    "fp16 logits and past": fp16_ends,
    "last position only": last_position_only,
    "no axis of positions": without_positions,
    "logits to keep": logits_to_keep,
    "token types": token_types,
    "two branches": merged,
    "a past not heeded": forgetful,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_feeds_follow_the_graphs_own_inputs(
    change: Callable[[Any], Any],
    llama: Path,
    tiny_model: Path,
    run: Callable[..., RunRecord],
    tmp_path: Path,
) -> None:
    folder = copy_folder(llama, tmp_path, change)
    within = 2e-3 if change is fp16_ends else 1e-4
    assert_same_answers(run(folder, "theirs"), run(tiny_model, "ours"), within)
    ids = np.random.default_rng(1).integers(2, 600, 30)
    model, own = open_folder(folder), open_folder(tiny_model)
    assert model.continues == (change is not forgetful)
    found = letter_reader(model, SEVERAL).read(ids).values
    expected = letter_reader(own, SEVERAL).read(ids).values
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)
    assert found.dtype == np.float32


def test_each_precision_in_a_subfolder_is_chosen_by_its_name(
    llama: Path, run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    folder = copy_folder(llama, tmp_path)
    (folder / "onnx").mkdir()
    full = folder / "onnx" / "model.onnx"
    (folder / "model.onnx").rename(full)
    quantize_dynamic(full, folder / "onnx" / "model_int8.onnx", weight_type=QuantType.QInt8)
    first = run(folder, "first")
    assert first.manifest.graph == "onnx/model.onnx"
    other = run(folder, "other", file="onnx/model_int8.onnx")
    assert other.manifest.graph == "onnx/model_int8.onnx"
    assert other.manifest.name == f"{folder.name} model_int8"
    assert first.manifest.name == folder.name
    assert 0 < np.abs(values(first) - values(other)).max() < 2
    assert "onnx/model_int8.onnx" in other.manifest.files
    assert "onnx/model.onnx" not in other.manifest.files


# ---- what the record says


def test_the_record_describes_the_folder(llama: Path, run: Callable[..., RunRecord]) -> None:
    manifest = run(llama).manifest
    assert manifest.source == manifest.name == llama.name
    assert (manifest.architecture, manifest.precision) == ("llama", "as found")
    assert (manifest.n_layers, manifest.hidden_size, manifest.max_length) == (3, 64, 1024)
    assert manifest.vocab_size == 600
    assert set(manifest.files) >= {"model.onnx", "tokenizer.json", "config.json"}
    for name, facts in manifest.files.items():
        assert facts["sha256"] == sha256_of(llama / name)
        assert facts["size_bytes"] == (llama / name).stat().st_size


def test_genais_configuration_is_enough(
    llama: Path, tiny_model: Path, run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    folder = copy_folder(llama, tmp_path)
    (folder / "config.json").unlink()
    (folder / "model.onnx").rename(folder / "decoder.onnx")
    (folder / "other.onnx").write_bytes(b"")
    decoder = {"filename": "decoder.onnx", "hidden_size": 64, "num_hidden_layers": 3}
    window = {"sliding_window": {"window_size": 48}}
    model = {"type": "llama", "vocab_size": 600, "context_length": 1024}
    content = {"model": model | {"decoder": decoder | window}}
    (folder / "genai_config.json").write_text(json.dumps(content))
    record = run(folder, "theirs")
    assert_same_answers(record, run(tiny_model, "ours"))
    manifest = record.manifest
    assert (manifest.graph, manifest.architecture) == ("decoder.onnx", "llama")
    assert (manifest.max_length, manifest.sliding_window) == (1024, 48)


def test_a_prompt_longer_than_the_configuration_allows_is_counted_not_cut(
    llama: Path, run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    longest = run(llama).predictions
    limit = sorted(p.n_tokens for p in longest)[len(longest) // 2]
    folder = copy_folder(llama, tmp_path, max_position_embeddings=limit)
    found = run(folder, "short").predictions
    expected = [p.n_tokens > limit for p in longest]
    assert [p.status.value == "too_long" for p in found] == expected


def test_an_interrupted_run_goes_on_and_not_with_another_graph(
    llama: Path, run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    whole = run(llama)
    path = tmp_path / "record.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]))
    assert run(llama, file="model.onnx").predictions[0] == whole.predictions[0]
    assert read_record(path).complete
    path.write_bytes(b"".join(lines[:5]))
    with pytest.raises(RecordError, match="files"):
        run(copy_folder(llama, tmp_path, int32_inputs))


def test_doctor_bench_and_matrix_take_a_folder(
    llama: Path, without_past: Path, tmp_path: Path
) -> None:
    for folder in (llama, without_past):
        found = json.loads(invoke("doctor", folder, "--json").stdout)
        assert found["max_length"] == 1024
        assert 0 < found["templates"]["en-latin"]["letter_mass"] < 1
    options = ["--lengths", "16", "--seconds", "1", "--threads", "1", "--json"]
    figures = json.loads(invoke("bench", llama, "--file", "model.onnx", *options).stdout)
    assert figures["model"]["graph"] == "model.onnx"
    # Seven products a layer, and the head.
    weights = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 48) + 64 * 600
    assert figures["n_product_weights"] == weights
    found = json.loads(invoke("matrix", llama, "--limit", "4", "-o", tmp_path, "--json").stdout)
    assert len(found["cells"]) == 4


def test_a_run_says_what_the_head_in_the_graph_costs(llama: Path, tmp_path: Path) -> None:
    result = invoke("run", llama, "--limit", "2", "-o", tmp_path / "r.jsonl")
    assert f"edge-eval export {llama} -o DIR" in " ".join(result.stderr.split())


# ---- what is refused, in one line and before a record is begun


def forge(path: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes(content)


def change_graph(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        graph = onnx.load(folder / "model.onnx")
        change(graph)
        (folder / "model.onnx").write_bytes(graph.SerializeToString())

    return damage


def weights_in(location: str) -> Callable[[Path], None]:
    def move(graph: Any) -> None:
        weight = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)

    return change_graph(move)


def link(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return damage


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for each in damages:
            each(folder)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rename(old: str, new: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        value_of(graph, old).name = new
        for node in graph.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]

    return change


def one_length(graph: Any) -> None:
    value_of(graph, "input_ids").type.tensor_type.shape.dim[1].dim_value = 128


def in_bf16(graph: Any) -> None:
    insert_cast(graph, "logits", onnx.TensorProto.BFLOAT16, at_end=True)


def set_config(**settings: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | settings), encoding="utf-8")

    return damage


def second_graph(folder: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        shutil.copyfile(folder / "model.onnx", folder / name)
    (folder / "model.onnx").unlink()


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights outside": (weights_in("../outside.bin"), "outside the folder"),
    "weights anywhere": (weights_in("/etc/hostname"), "outside the folder"),
    "weights missing": (weights_in("gone.bin"), "gone.bin is missing"),
    "weights linked outside": (
        both(weights_in("linked.bin"), forge("linked.bin", b"secret"), link("linked.bin")),
        "outside its folder",
    ),
    "graph linked outside": (link("model.onnx"), "outside its folder"),
    "tokenizer linked outside": (link("tokenizer.json"), "outside its folder"),
    "pickle": (forge("model.onnx", pickle.dumps({"weights": [1.0] * 100})), "not an ONNX graph"),
    "empty graph": (forge("model.onnx", b""), "not an ONNX graph"),
    "no tokenizer": (remove("tokenizer.json"), "no tokenizer.json"),
    "no configuration": (remove("config.json"), "neither config.json nor genai_config.json"),
    "no vocabulary": (set_config(vocab_size=None), "vocab_size"),
    "broken configuration": (forge("config.json", b"{"), "config.json cannot be read"),
    "encoder-decoder": (set_config(is_encoder_decoder=True), "encoder-decoder"),
    "another vocabulary": (set_config(vocab_size=10_000), "600 logits"),
    "several graphs": (second_graph, "--file, a.onnx or b.onnx"),
    "bfloat16": (change_graph(in_bf16), "bfloat16"),
    "embedded tokens": (change_graph(rename("input_ids", "inputs_embeds")), "takes inputs_embeds"),
    "an unknown input": (change_graph(rename("attention_mask", "pixel_values")), "pixel_values"),
    "another task": (change_graph(rename("logits", "last_hidden_state")), "not logits"),
    "one length": (change_graph(one_length), "any length"),
    "no present": (change_graph(rename("present.0.key", "gone")), "no output present.0.key"),
}


@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_said_in_one_line(
    damage: Callable[[Path], None], message: str, llama: Path, tmp_path: Path
) -> None:
    folder = copy_folder(llama, tmp_path)
    damage(folder)
    with pytest.raises(EdgeEvalError) as caught:
        evaluate(config_of(folder), tmp_path / "r.jsonl")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("file", ["gone.onnx", "../copy/model.onnx", "/etc/hostname"])
def test_a_file_that_is_not_the_folders_is_refused(file: str, llama: Path, tmp_path: Path) -> None:
    folder = copy_folder(llama, tmp_path)
    with pytest.raises((OptionError, ModelError)):
        describe_folder(folder, file)


def test_a_model_directory_has_no_file_to_choose(tiny_model: Path) -> None:
    with pytest.raises(OptionError, match="leave --file out"):
        read_any_manifest(tiny_model, "model.onnx")


def test_a_model_directory_that_lost_its_manifest_is_no_onnx_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (directory / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"no manifest\.json"):
        read_any_manifest(directory)


def test_a_graph_cut_anywhere_is_no_graph(llama: Path, tmp_path: Path) -> None:
    folder = copy_folder(llama, tmp_path)
    content = (folder / "model.onnx").read_bytes()
    for n in np.random.default_rng(0).integers(1, len(content) - 1, 25):
        (folder / "model.onnx").write_bytes(content[:n])
        with pytest.raises(ModelError) as caught:
            open_folder(folder)
        assert "\n" not in str(caught.value)
