"""ONNX folder -> model directory: the vocabulary head and the embedding cut off, without torch.

The graph's last product is the head: what stands behind it (a bias, a factor, a soft cap) goes into
the manifest, what goes into it becomes the output. Nothing is rounded anew: a quantised head or
embedding is refused. Proved against the uncut graph before the directory gets its name.
"""

import importlib.metadata
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_eval.errors import ExportError
from edge_eval.model_dir import (
    EMBEDDING,
    GRAPH,
    HEAD,
    HEAD_BIAS,
    SCHEMA_VERSION,
    describe_files,
    write_manifest,
)
from edge_eval.onnx_folder import GENAI, describe_folder
from edge_eval.schema import ExportManifest
from exporters.huggingface import new_directory

Array = npt.NDArray[Any]

TOOLS = ("edge-eval", "onnx", "onnx-ir", "onnxruntime", "tokenizers")

# Inputs that edge_eval/model.py feeds beside inputs_embeds and past_key_values.*.
KEPT_INPUTS = ("attention_mask", "position_ids")

# In the names of operators whose weights or activations are integers.
QUANTISED = ("NBits", "Integer", "Quantize", "QLinear", "QGemm", "QMoE", "Bnb4")
# How far behind the logits a quantised head shows: scales, zero points and casts lie between.
QUANTISED_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Head:
    """The last product of a graph and what follows it: cap * tanh((table @ x + bias) * scale / cap)."""

    hidden: Any  # the product's input
    table: Array  # (vocab, hidden)
    bias: Array | None
    scale: float
    softcap: float | None


def export_onnx_folder(source: Path, output: Path, file: str = "") -> ExportManifest:
    """Cut an ONNX folder's graph and write the model directory ``output``.

    Errors: ModelError for a folder that could not be run either, ExportError for a graph that
    cannot be cut exactly or does not survive it; then nothing is left at ``output``.
    """
    from exporters.verify import compare_with_uncut

    found = describe_folder(source, file)
    with new_directory(output) as directory:
        cut = _cut(source, found, directory)
        for name in found.files:
            if name.endswith((".json", ".jinja")) and name != GENAI:
                shutil.copyfile(source / name, directory / name)
        manifest = replace(cut, parity=compare_with_uncut(directory, cut, source, found))
        files = [path.name for path in directory.iterdir()]
        manifest = replace(manifest, files=describe_files(directory, files))
        write_manifest(directory, manifest)
    return manifest


def _cut(source: Path, found: ExportManifest, directory: Path) -> ExportManifest:
    """Write graph and tables into ``directory``; the manifest, without files and parity."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    path = source / found.graph
    try:
        model = ir.load(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ExportError(f"{path} cannot be read by onnx-ir: {error}") from error
    refuse = _Refusal(source)
    head = find_head(model.graph, refuse)
    hidden_size = head.table.shape[1]
    _end_at_hidden_state(model.graph, head.hidden, hidden_size)
    embedding = _begin_at_embedding(model.graph, hidden_size, refuse)
    RemoveUnusedNodesPass()(model)
    _keep_known_inputs(model.graph, refuse)
    precision = _precision(model.graph)
    tied = np.array_equal(embedding, head.table)
    np.save(directory / HEAD, head.table)
    if not tied:
        np.save(directory / EMBEDDING, embedding)
    if head.bias is not None:
        np.save(directory / HEAD_BIAS, head.bias.astype(np.float32))
    n_pasts = sum(value.name.startswith("past_key_values.") for value in model.graph.inputs)
    ir.save(model, directory / GRAPH, external_data=GRAPH + "_data")
    return replace(
        found,
        schema_version=SCHEMA_VERSION,
        precision=precision,
        graph="cut",
        n_layers=found.n_layers or n_pasts // 2,
        hidden_size=hidden_size,
        vocab_size=len(embedding),
        tied_embedding=tied,
        head_bias=head.bias is not None,
        head_scale=head.scale,
        head_softcap=head.softcap,
        files={},
        tools={name: importlib.metadata.version(name) for name in TOOLS},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Refusal:
    """Makes the one line that says why a graph is not cut and what takes it instead."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __call__(self, reason: str) -> ExportError:
        return ExportError(
            f"{self._source} cannot be cut: {reason}. Try the folder as it is, which "
            f"needs no cut: `edge-eval run {self._source}`; an export of its checkpoint is faster."
        )


# ---- the head


def find_head(graph: Any, refuse: _Refusal) -> Head:
    """The product that makes the output named logits, and what follows it."""
    logits = next((value for value in graph.outputs if value.name == "logits"), None)
    if logits is None:
        raise refuse("it has no output named logits")
    value = _before_choice(logits)
    cap, value = _softcap(value)
    scale, value = _scale(value)
    bias = None
    node = value.producer()
    if node is not None and node.op_type == "Add" and (parts := _with_constant(node)):
        value, bias = _before_choice(parts[0]), parts[1].reshape(-1)
        node = value.producer()
    # transposed: whether the product's weight is (vocab, hidden) already
    factor, transposed = 1.0, False
    if node is not None and node.op_type in {"Gemm", "FusedMatMul"}:
        settings = {name: item.value for name, item in node.attributes.items()}
        factor = float(settings.get("alpha", 1.0))
        transposed = bool(settings.get("transB"))
        if settings.get("transA") or settings.get("transBatchA") or settings.get("transBatchB"):
            raise refuse(f"its last product, a {node.op_type}, transposes what goes into it")
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            offset = _constant(node.inputs[2])
            if offset is None or factor != 1.0 or settings.get("beta", 1.0) != 1.0:
                raise refuse(f"its last product, a {node.op_type}, adds more than a bias")
            bias = offset.reshape(-1) if bias is None else bias + offset.reshape(-1)
    elif node is None or node.op_type != "MatMul":
        raise refuse(_why_no_head(value))
    table = _table(node.inputs[1], transposed=not transposed)
    if table is None:
        raise refuse(_why_no_head(value))
    width = logits.shape[-1] if logits.shape else None
    if type(width) is int and width != len(table):
        raise refuse(f"its last product gives {len(table)} numbers and the graph {width} logits")
    if bias is not None and bias.shape not in {(1,), (len(table),)}:
        raise refuse(f"behind its last product {bias.size} numbers are added to {len(table)}")
    if bias is not None:
        bias = np.broadcast_to(bias, len(table)) / np.float32(factor)
    return Head(_before_choice(node.inputs[0]), table, bias, scale * factor, cap)


def _behind(value: Any) -> Any:
    """The value that a chain of casts and copies ending here began with."""
    while (node := value.producer()) is not None and node.op_type in {"Cast", "Identity"}:
        value = node.inputs[0]
    return value


def _before_choice(value: Any) -> Any:
    """A value of all positions, where what is made of it keeps only some or folds their axes."""
    chosen = {"Slice", "Gather", "GatherND", "GatherElements", "Cast", "Identity", "Reshape"}
    chosen |= {"Squeeze", "Unsqueeze", "Flatten"}
    while (node := value.producer()) is not None and node.op_type in chosen:
        value = node.inputs[0]
    return value


def _constant(value: Any) -> Array | None:
    from onnx_ir.convenience import get_const_tensor

    tensor = get_const_tensor(_behind(value))
    return None if tensor is None else np.asarray(tensor.numpy())


def _with_constant(node: Any) -> tuple[Any, Array] | None:
    """What a sum or product of two has that is computed, and what is constant."""
    first, second = node.inputs
    for value, other in ((first, second), (second, first)):
        constant = _constant(other)
        if constant is not None:
            return value, constant
    return None


def _scalar_of(node: Any) -> tuple[Any, float] | None:
    """A value and the one number it is multiplied with, through Mul or Div."""
    if node is None or node.op_type not in {"Mul", "Div"}:
        return None
    parts = _with_constant(node)
    if (
        parts is None
        or parts[1].size != 1
        or (node.op_type == "Div" and parts[0] is node.inputs[1])
    ):
        return None
    number = float(parts[1].reshape(-1)[0])
    return _before_choice(parts[0]), number if node.op_type == "Mul" else 1.0 / number


def _softcap(value: Any) -> tuple[float | None, Any]:
    """The cap of cap * tanh(x / cap) and x, or None and the value itself."""
    outer = _scalar_of(value.producer())
    tanh = outer[0].producer() if outer else None
    if outer is None or tanh is None or tanh.op_type != "Tanh":
        return None, value
    inner = _scalar_of(_behind(tanh.inputs[0]).producer())
    if inner is None or not np.isclose(inner[1] * outer[1], 1.0, rtol=1e-3):
        return None, value
    return outer[1], inner[0]


def _scale(value: Any) -> tuple[float, Any]:
    scale = 1.0
    while found := _scalar_of(value.producer()):
        value, factor = found
        scale *= factor
    return scale, value


def _table(value: Any, *, transposed: bool) -> Array | None:
    """A constant matrix in float32 or float16, turned round if ``transposed``; None for others."""
    value = _behind(value)
    node = value.producer()
    if node is not None and node.op_type == "Transpose":
        value, transposed = _behind(node.inputs[0]), not transposed
    matrix = _constant(value)
    if matrix is None or matrix.ndim != 2 or matrix.dtype.kind in "iub":
        return None
    if matrix.dtype not in (np.float32, np.float16):
        matrix = matrix.astype(np.float32)
    return np.ascontiguousarray(matrix.T if transposed else matrix)


def _why_no_head(value: Any) -> str:
    """Why the logits are no plain product: quantised, in a branch, or made otherwise."""
    node = value.producer()
    if node is None:
        return "its logits are not computed"
    if node.op_type == "If":
        return "its head stands inside a branch (use_cache_branch)"
    found = next((op for op in _operators_behind(value) if any(q in op for q in QUANTISED)), "")
    if found:
        return f"its vocabulary head is quantised ({found})"
    return f"its logits come from {node.op_type}, not from a product with a table"


def _operators_behind(value: Any) -> Iterator[str]:
    values = [value]
    for _ in range(QUANTISED_DEPTH):
        nodes = [node for item in values if (node := item.producer()) is not None]
        yield from (node.op_type for node in nodes)
        values = [item for node in nodes for item in node.inputs if item is not None]


# ---- the graph's new ends


def _end_at_hidden_state(graph: Any, hidden: Any, hidden_size: int) -> None:
    """Make last_hidden_state (1, seq, hidden) in float32 and the keys and values the outputs."""
    import onnx_ir as ir

    shape = _add_constant(graph, "edge_eval.hidden_shape", np.array([1, -1, hidden_size], np.int64))
    single = _append(graph, ir.node("Cast", [hidden], {"to": ir.DataType.FLOAT}))
    last = _append(graph, ir.node("Reshape", [single, shape]))
    outputs = [_typed(last, "last_hidden_state", ir.Shape([1, "sequence_length", hidden_size]))]
    for value in list(graph.outputs):
        if not value.name.startswith("present"):
            continue
        if value.dtype == ir.DataType.FLOAT:
            outputs.append(value)
            continue
        name, shape = value.name, value.shape
        value.name = f"{name}.as_found"
        single = _append(graph, ir.node("Cast", [value], {"to": ir.DataType.FLOAT}))
        outputs.append(_typed(single, name, shape))
    del graph.outputs[:]
    graph.outputs.extend(outputs)


def _begin_at_embedding(graph: Any, hidden_size: int, refuse: _Refusal) -> Array:
    """Make inputs_embeds an input instead of input_ids; the table (vocab, hidden) looked up so far."""
    import onnx_ir as ir
    from onnx_ir.convenience import replace_all_uses_with

    ids = next((value for value in graph.inputs if value.name == "input_ids"), None)
    if ids is None:
        raise refuse("it takes no input_ids")
    # The ids as they are or reshaped; who reads their values, and who only their shape.
    same, readers = [ids], []
    for value in same:
        for node, _ in value.uses():
            if node.op_type in {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze"}:
                same.append(node.outputs[0])
            elif node.op_type != "Shape":
                readers.append(node)
    gathers = [n for n in readers if n.op_type == "Gather" and n.inputs[1] in same]
    if len(gathers) != 1 or len(readers) != 1:
        ops = ", ".join(sorted({node.op_type for node in readers}))
        raise refuse(f"its token ids are used otherwise than for one embedding ({ops})")
    table = _table(gathers[0].inputs[0], transposed=False)
    if table is None or table.shape[1] != hidden_size:
        raise refuse("its embedding is no table as wide as the hidden state")
    embedded = ir.val("inputs_embeds", ir.DataType.FLOAT, [1, "sequence_length", hidden_size])
    # In the ids' place, for those who ask their shape: something of it.
    first = _add_constant(graph, "edge_eval.first", np.array(0, np.int64))
    column = ir.node("Gather", [embedded, first], {"axis": 2})
    stand_in = ir.node("Cast", column.outputs, {"to": ids.dtype})
    nodes = [column, stand_in]
    wanted = _dtype_of(gathers[0].inputs[0])
    rows = embedded
    if wanted != ir.DataType.FLOAT:
        nodes.append(ir.node("Cast", [embedded], {"to": wanted}))
        rows = nodes[-1].outputs[0]
    graph.insert_before(graph[0], nodes)
    replace_all_uses_with(gathers[0].outputs[0], rows)
    replace_all_uses_with(ids, stand_in.outputs[0])
    graph.inputs[graph.inputs.index(ids)] = embedded
    return table


def _dtype_of(value: Any) -> Any:
    """The type of a table, which a graph tells only where it begins and where it is cast."""
    while value.dtype is None and (node := value.producer()) is not None:
        if node.op_type == "Cast":
            return node.attributes["to"].value
        value = node.inputs[0]
    return value.dtype


def _keep_known_inputs(graph: Any, refuse: _Refusal) -> None:
    """Drop inputs nobody reads any more, and give the others the types edge-eval feeds."""
    import onnx_ir as ir
    from onnx_ir.convenience import replace_all_uses_with

    pasts = 0
    for value in list(graph.inputs):
        fed = ir.DataType.INT64
        if value.name.startswith("past_key_values."):
            shape = value.shape
            if shape is None or len(shape) != 4 or not all(type(shape[i]) is int for i in (1, 3)):
                raise refuse(
                    f"its input {value.name} has another form than (1, heads, past, width)"
                )
            pasts += 1
            fed = ir.DataType.FLOAT
        elif not value.uses():
            graph.inputs.remove(value)
            continue
        elif value.name == "inputs_embeds":
            continue
        elif value.name not in KEPT_INPUTS:
            raise refuse(f"it takes {value.name}, which a model directory is not fed")
        if value.dtype != fed:
            retyped = ir.node("Cast", [value], {"to": value.dtype})
            replace_all_uses_with(value, retyped.outputs[0])
            # The line above turned the cast's own input too.
            retyped.replace_input_with(0, value)
            value.dtype = fed
            graph.insert_before(graph[0], [retyped])
    presents = {value.name for value in graph.outputs}
    if not pasts:
        raise refuse(
            "it takes no past_key_values, without which no prompt can be continued (optimum exports "
            "them by --task text-generation-with-past)"
        )
    for value in graph.inputs:
        name = value.name.replace("past_key_values", "present")
        if name.startswith("present") and name not in presents:
            raise refuse(f"it takes {value.name} and gives no {name}")


def _precision(graph: Any) -> str:
    """What the graph's products are in: int4, int8, fp16 or fp32."""
    import onnx_ir as ir

    nodes = [node for node in graph if any(part in node.op_type for part in QUANTISED)]
    bits = [node.attributes["bits"].value for node in nodes if "bits" in node.attributes]
    if nodes:
        return f"int{min(bits, default=8)}"
    halves = [v for v in graph.initializers.values() if v.dtype == ir.DataType.FLOAT16]
    return "fp16" if any(v.const_value.size > 1 for v in halves) else "fp32"


def _add_constant(graph: Any, name: str, number: Array) -> Any:
    import onnx_ir as ir

    value = ir.Value(name=name, const_value=ir.tensor(number, name=name))
    value.dtype, value.shape = ir.DataType.from_numpy(number.dtype), ir.Shape(number.shape)
    graph.register_initializer(value)
    return value


def _append(graph: Any, node: Any) -> Any:
    graph.append(node)
    return node.outputs[0]


def _typed(value: Any, name: str, shape: Any) -> Any:
    import onnx_ir as ir

    value.name, value.shape = name, shape
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return value
