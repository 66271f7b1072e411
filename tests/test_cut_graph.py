"""A head cut off another's graph leaves a model directory that answers as the whole graph does."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from test_evaluate import config_of, values
from test_model import SEVERAL
from test_onnx_folder import (
    FAMILIES,
    add_numbers,
    assert_same_answers,
    before_head,
    copy_folder,
    fp16_ends,
    insert_cast,
    int32_inputs,
    last_position_only,
    llama,
    logits_to_keep,
    merged,
    open_folder,
    pairs,
    token_types,
    without_past,
    without_positions,
)

from edge_eval.errors import ExportError, ModelError
from edge_eval.evaluate import evaluate
from edge_eval.model import letter_reader
from edge_eval.schema import ExportManifest, RunConfig
from exporters.cut_graph import export_onnx_folder
from exporters.verify import verify_directory

__all__ = ["llama", "pairs", "without_past"]  # fixtures


def cut(folder: Path, tmp_path: Path) -> tuple[Path, ExportManifest]:
    output = tmp_path / "cut"
    return output, export_onnx_folder(folder, output)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cut_graph_answers_as_our_own_export_does(
    family: str, pairs: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, own = pairs(family)
    directory, manifest = cut(folder, tmp_path)
    ours = evaluate(config_of(own), tmp_path / "ours.jsonl")
    assert_same_answers(evaluate(config_of(directory), tmp_path / "theirs.jsonl"), ours)
    for name in ("architecture", "n_layers", "hidden_size", "vocab_size", "max_length"):
        assert getattr(manifest, name) == getattr(ours.manifest, name)
    for name in ("sliding_window", "tied_embedding", "head_softcap", "precision"):
        assert getattr(manifest, name) == getattr(ours.manifest, name)
    assert manifest.graph == "cut"
    assert verify_directory(directory)["reference"] == "uncut graph"
    ids = np.random.default_rng(2).integers(2, 500, 30)
    found, expected = (letter_reader(open_folder(d), SEVERAL).read(ids) for d in (directory, own))
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-4, atol=1e-4)


def test_weights_and_ends_are_those_of_a_model_directory(llama: Path, tmp_path: Path) -> None:
    directory, _ = cut(llama, tmp_path)
    names = {path.name for path in directory.iterdir()}
    assert names >= {"model.onnx", "model.onnx_data", "lm_head.npy", "tokenizer.json"}
    graph = onnx.load(directory / "model.onnx", load_external_data=False).graph
    ends = {value.name for value in (*graph.input, *graph.output)}
    assert {"inputs_embeds", "last_hidden_state", "attention_mask", "present.2.value"} <= ends
    assert not {"input_ids", "logits"} & ends
    # Neither table is left in the graph.
    assert all(600 not in tensor.dims for tensor in graph.initializer)


def as_gemm(graph: Any) -> None:
    """The head as one product and sum, its weight (vocab, hidden), of flattened positions."""
    head = before_head(graph)
    weight = next(t for t in graph.graph.initializer if t.name == head.input[1])
    table = numpy_helper.to_array(weight).T
    bias = np.random.default_rng(3).standard_normal(600).astype(np.float32)
    add_numbers(graph, rows=np.ascontiguousarray(table), bias=bias)
    add_numbers(graph, flat=np.array([-1, 64]), full=np.array([1, -1, 600]))
    nodes = [
        helper.make_node("Reshape", [head.input[0], "flat"], ["x"]),
        helper.make_node("Gemm", ["x", "rows", "bias"], ["y"], transB=1),
        helper.make_node("Reshape", ["y", "full"], ["logits"]),
    ]
    graph.graph.node.remove(head)
    graph.graph.initializer.remove(weight)
    graph.graph.node.extend(nodes)


def with_tail(*, scale: bool, cap: bool, bias: bool) -> Callable[[Any], None]:
    """A bias, a factor (Cohere's) and a soft cap (Gemma 2's) behind the head."""

    def change(graph: Any) -> None:
        before_head(graph).output[0] = name = "product"
        add_numbers(graph, factor=np.array(0.25, np.float32), cap=np.array([2.0], np.float32))
        offset = np.random.default_rng(4).standard_normal(600).astype(np.float32)
        add_numbers(graph, offset=offset)
        steps = [("Add", [name, "offset"])] * bias + [("Mul", ["factor", name])] * scale
        steps += [("Div", [name, "cap"]), ("Tanh", [name]), ("Mul", [name, "cap"])] * cap
        for number, (op, inputs) in enumerate(steps):
            inputs = [name if i == "product" else i for i in inputs]
            name = "logits" if number == len(steps) - 1 else f"step{number}"
            graph.graph.node.append(helper.make_node(op, inputs, [name]))

    return change


def tied_by_a_transpose(graph: Any) -> None:
    """One table for both ends, turned round in the graph, as SPEED's tied heads are."""
    head = before_head(graph)
    lookup = next(node for node in graph.graph.node if node.op_type == "Gather")
    node = helper.make_node("Transpose", [lookup.input[0]], ["turned"], perm=[1, 0])
    graph.graph.node.insert(list(graph.graph.node).index(head), node)
    head.input[1] = "turned"


def in_fp16(graph: Any) -> None:
    """Both tables and the head's product in float16, the body in float32."""
    head = before_head(graph)
    lookup = next(node for node in graph.graph.node if node.op_type == "Gather")
    for name in (head.input[1], lookup.input[0]):
        tensor = next(t for t in graph.graph.initializer if t.name == name)
        halved = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(halved, name))
    x, embedded = head.input[0], lookup.output[0]
    head.input[0], lookup.output[0] = "x16", "rows16"
    to16 = helper.make_node("Cast", [x], ["x16"], to=onnx.TensorProto.FLOAT16)
    to32 = helper.make_node("Cast", ["rows16"], [embedded], to=onnx.TensorProto.FLOAT)
    graph.graph.node.insert(list(graph.graph.node).index(head), to16)
    graph.graph.node.insert(list(graph.graph.node).index(lookup) + 1, to32)
    value = next(v for v in graph.graph.output if v.name == "logits")
    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


CUTS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "int32 inputs": (int32_inputs, {}),
    "fp16 logits and past": (fp16_ends, {}),
    "fp16 tables": (in_fp16, {}),
    "last position only": (last_position_only, {}),
    "no axis of positions": (without_positions, {}),
    "logits to keep": (logits_to_keep, {}),
    "Gemm with a bias": (as_gemm, {"head_bias": True}),
    "tied by a Transpose": (tied_by_a_transpose, {"tied_embedding": True}),
    "a factor": (with_tail(scale=True, cap=False, bias=False), {"head_scale": 0.25}),
    "everything": (
        with_tail(scale=True, cap=True, bias=True),
        {"head_scale": 0.25, "head_softcap": 2.0, "head_bias": True},
    ),
}


@pytest.mark.parametrize(("change", "expected"), CUTS.values(), ids=CUTS)
def test_what_stands_behind_the_head_goes_into_the_manifest(
    change: Callable[[Any], Any], expected: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    folder = copy_folder(llama, tmp_path, change)
    directory, manifest = cut(folder, tmp_path)
    neutral = {"head_scale": 1.0, "head_softcap": None, "head_bias": False, "tied_embedding": False}
    assert {name: getattr(manifest, name) for name in neutral} == neutral | expected
    uncut = evaluate(config_of(folder), tmp_path / "uncut.jsonl")
    found = evaluate(config_of(directory), tmp_path / "cut.jsonl")
    half = change in (in_fp16, fp16_ends)
    np.testing.assert_allclose(values(found), values(uncut), atol=5e-3 if half else 1e-4)
    if half:
        assert values(found).dtype == values(uncut).dtype
    else:
        assert_same_answers(found, uncut)


def test_the_command_needs_neither_torch_nor_transformers(llama: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'optimum', 'gguf'): sys.modules[name] = None\n"
        "from edge_eval.cli import main\n"
        f"sys.argv = ['edge-eval', 'export', {str(llama)!r}, '-o', {str(tmp_path / 'cut')!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cut graph" in done.stdout
    assert "of the uncut graph's" in " ".join(done.stdout.split())


# ---- what is not cut


def quantised_head(graph: Any) -> None:
    """The head's weight in 4 bits, as the genai builder's int4 has it."""
    head = before_head(graph)
    packed = np.random.default_rng(5).integers(0, 256, (600, 2, 16)).astype(np.uint8)
    add_numbers(graph, packed=packed, scales=np.full(1200, 0.01, np.float32))
    node = helper.make_node(
        "MatMulNBits",
        [head.input[0], "packed", "scales"],
        ["logits"],
        domain="com.microsoft",
        K=64,
        N=600,
        bits=4,
        block_size=32,
    )
    graph.graph.node.remove(head)
    graph.graph.node.append(node)
    graph.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def dynamic_int8(graph: Any) -> Any:
    import tempfile

    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        onnx.save(graph, path)
        quantize_dynamic(path, path.with_name("int8.onnx"), weight_type=QuantType.QInt8)
        return onnx.load(path.with_name("int8.onnx"))


def ids_by_value(graph: Any) -> None:
    """Something beside the embedding that reads the token ids."""
    add_numbers(graph, zero=np.array(0, np.float32))
    head = before_head(graph)
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["ids"], ["largest"], keepdims=0),
        helper.make_node("Mul", ["largest", "zero"], ["nothing"]),
        helper.make_node("Add", [head.input[0], "nothing"], ["shifted"]),
    ]
    at = list(graph.graph.node).index(head)
    for offset, node in enumerate(nodes):
        graph.graph.node.insert(at + offset, node)
    head.input[0] = "shifted"


def softmax(graph: Any) -> None:
    before_head(graph).output[0] = "raw"
    graph.graph.node.append(helper.make_node("LogSoftmax", ["raw"], ["logits"], axis=-1))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int4 head": (quantised_head, r"head is quantised \(MatMulNBits\)"),
    "int8 head": (dynamic_int8, r"head is quantised"),
    "two branches": (merged, "branch"),
    "token types": (token_types, "token_type_ids"),
    "ids by value": (ids_by_value, "token ids"),
    "log-probabilities": (softmax, "LogSoftmax"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_refused_and_still_runs(
    change: Callable[[Any], Any], message: str, llama: Path, tmp_path: Path
) -> None:
    folder = copy_folder(llama, tmp_path, change)
    with pytest.raises(ExportError, match=message) as caught:
        cut(folder, tmp_path)
    assert f"needs no cut: `edge-eval run {folder}`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
    assert evaluate(config_of(folder, limit=2), tmp_path / "r.jsonl").complete


def test_a_graph_without_past_is_refused(without_past: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="text-generation-with-past"):
        cut(without_past, tmp_path)


def first_position(graph: Any) -> None:
    """Looks like a choice of the last position and is one of the first."""
    head = before_head(graph)
    add_numbers(graph, first=np.array([0]))
    node = helper.make_node("Gather", [head.input[0], "first"], ["chosen"], axis=1)
    graph.graph.node.insert(list(graph.graph.node).index(head), node)
    head.input[0] = "chosen"


def test_a_cut_that_changes_the_answers_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    folder = copy_folder(llama, tmp_path, first_position)
    with pytest.raises(ExportError, match="the exported graph and the uncut graph disagree"):
        cut(folder, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_graph_in_bfloat16_is_refused_in_one_line(llama: Path, tmp_path: Path) -> None:
    def change(graph: Any) -> None:
        insert_cast(graph, "logits", onnx.TensorProto.BFLOAT16, at_end=True)

    with pytest.raises(Exception, match="bfloat16") as caught:
        cut(copy_folder(llama, tmp_path, change), tmp_path)
    assert "\n" not in str(caught.value)


def fewer_logits(graph: Any) -> None:
    before_head(graph).output[0] = "padded"
    add_numbers(graph, start=np.array([0]), end=np.array([590]), axis=np.array([2]))
    node = helper.make_node("Slice", ["padded", "start", "end", "axis"], ["logits"])
    graph.graph.node.append(node)
    value = next(v for v in graph.graph.output if v.name == "logits")
    value.type.tensor_type.shape.dim[2].dim_value = 590


def test_fewer_logits_than_the_vocabulary_are_neither_cut_nor_run(
    llama: Path, tmp_path: Path
) -> None:
    folder = copy_folder(llama, tmp_path, fewer_logits)
    with pytest.raises(ExportError, match="600 numbers and the graph 590 logits"):
        cut(folder, tmp_path)
    with pytest.raises(ModelError, match="gives 590 logits"):
        evaluate(RunConfig(model=str(folder), limit=2, threads=1), tmp_path / "run.jsonl")
