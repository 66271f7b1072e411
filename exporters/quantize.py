"""Model directory -> a smaller and faster one, its price measured; the recipes are PRECISIONS.

int8 products take their input's scale from the whole tensor, so one large value costs all the
others their resolution. Three things are done about it, none of which changes what the network
computes before rounding. Each input channel's range is divided out and multiplied into the
weight's rows (SmoothQuant); the division is carried by the norm before, by the columns of up_proj
or by the value heads. Where nothing can carry it, or rows differ too much in size (down_proj), a
norm of its own brings every row to one size, and the product is divided by what it took. And
the first token, whose activations dwarf all others', is run apart: its manifest says so.

Source: Xiao et al. 2023, SmoothQuant, section 4 (strength alpha); onnxruntime's
ContribOperators.md for the operators.
"""

import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_eval.environment import describe_machine, usable_cores
from edge_eval.errors import ExportError
from edge_eval.letters import OPTION_LETTERS
from edge_eval.model import Model, open_model, open_session
from edge_eval.model_dir import (
    EMBEDDING,
    GRAPH,
    HEAD,
    MANIFEST,
    describe_files,
    read_manifest,
    size_on_disk,
    verify_hashes,
    write_manifest,
)
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import ExportManifest, Float32Array, Int64Array, RunConfig
from edge_eval.tokenization import encode_prompts, load_tokenizer
from exporters.huggingface import new_directory
from exporters.verify import TEMPLATES, compare_with_manifest, single_letter_ids

GRAPH_DATA = GRAPH + "_data"

N_RANGE_PROMPTS = 16  # their activations set the channels' scales
N_CHOICE_PROMPTS = 40  # on these the products to keep are chosen; the rest is held out
N_ROWS = 192  # rows of each product's input on which its error is estimated

# How far the scales of an input go to its weight: 0 not at all, 1 altogether.
STRENGTH = 0.7

# A choice must stay this share of the bound away from it on the prompts it is made on.
MARGIN = 0.6

# Products kept one by one are worth less than their shape arithmetic below this many weights.
SMALLEST_PRODUCT = 1024

INT4_BLOCK = 32

# A letter's logit may move by this share of the largest when the tables become float16.
TABLE_TOLERANCE = 1e-3

# Initializers from here on live in the data file, on page boundaries so that they are mapped.
EXTERNAL_FROM_BYTES, ALIGNMENT = 1024, 65536

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a precision is made and what it promises."""

    bits: int
    keep_worst: bool  # products are kept in fp32 until the promise holds
    min_agreement: float  # share of prompts with the letter fp32 chooses
    max_kl: float  # mean Kullback-Leibler divergence over the letters, nats


PRECISIONS = {
    "int8": Recipe(8, True, 0.97, 0.005),
    "int8-fast": Recipe(8, False, 0.88, 0.05),
    "int4": Recipe(4, False, 0.80, 0.2),
}


# -- The graph -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """A graph's nodes and its weights, apart."""

    proto: Any  # ModelProto without initializers
    tensors: dict[str, Array]

    def nodes(self) -> list[Any]:
        return list(self.proto.graph.node)


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a constant matrix."""

    output: str
    weight: str  # (in, out)


@dataclass(frozen=True, slots=True)
class Carrier:
    """A tensor whose last axis, from ``start`` on, is the channels of a product's input."""

    tensor: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """An input with the products that share it, and what can carry its channels' scales."""

    x: str
    products: tuple[Product, ...]
    carriers: tuple[Carrier, ...] = ()
    heads_per_value: int = 1  # query heads that read one value head
    head_dim: int = 1
    varying_rows: bool = False  # its rows differ in size: nothing before it is a norm


def read_network(path: Path) -> Network:
    """The graph at ``path``, its Gemm nodes split into product and sum."""
    import onnx

    proto = onnx.load(str(path))
    tensors = {
        item.name: onnx.numpy_helper.to_array(item).copy() for item in proto.graph.initializer
    }
    del proto.graph.initializer[:]
    nodes: list[Any] = []
    for node in proto.graph.node:
        nodes.extend(_split_gemm(node, tensors))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    del proto.graph.value_info[:]
    return Network(proto, tensors)


def _split_gemm(node: Any, tensors: dict[str, Array]) -> list[Any]:
    from onnx import helper

    settings = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    plain = not settings.get("transA") and all(
        settings.get(name, 1.0) == 1.0 for name in ("alpha", "beta")
    )
    if node.op_type != "Gemm" or not plain or node.input[1] not in tensors:
        return [node]
    weight = node.input[1]
    if settings.get("transB"):
        tensors[weight + "_t"] = np.ascontiguousarray(tensors[weight].T)
        weight += "_t"
    if len(node.input) < 3:
        return [helper.make_node("MatMul", [node.input[0], weight], node.output, node.name)]
    product = node.output[0] + "_product"
    return [
        helper.make_node("MatMul", [node.input[0], weight], [product], node.name),
        helper.make_node("Add", [product, node.input[2]], node.output),
    ]


def find_sites(network: Network) -> list[Site]:
    """The products' inputs; those whose scales change another product's columns come first."""
    tensors = network.tensors
    producers = {name: node for node in network.nodes() for name in node.output}
    uses: dict[str, int] = {}
    readers: dict[str, int] = {}
    for node in network.nodes():
        for name in node.input:
            (uses if name in tensors else readers).setdefault(name, 0)
            if name in tensors:
                uses[name] += 1
            else:
                readers[name] += 1
    for value in network.proto.graph.output:
        readers[value.name] = readers.get(value.name, 0) + 1
    by_input: dict[str, list[Product]] = {}
    for node in network.nodes():
        if node.op_type != "MatMul" or node.input[1] not in tensors:
            continue
        weight = tensors[node.input[1]]
        if weight.ndim == 2 and weight.size >= SMALLEST_PRODUCT and uses[node.input[1]] == 1:
            by_input.setdefault(node.input[0], []).append(Product(node.output[0], node.input[1]))

    search = _CarrierSearch(tensors, producers, uses, readers)
    sites = [search.site(x, tuple(products)) for x, products in by_input.items()]
    return sorted(sites, key=lambda site: not site.varying_rows)


@dataclass(frozen=True, slots=True)
class _CarrierSearch:
    tensors: dict[str, Array]
    producers: dict[str, Any]
    uses: dict[str, int]  # of a tensor
    readers: dict[str, int]  # of a computed value

    def site(self, x: str, products: tuple[Product, ...]) -> Site:
        node = self.producers.get(x)
        if node is not None and self.readers[x] == len(products):
            width = self.tensors[products[0].weight].shape[0]
            vectors = [
                Carrier(name)
                for name in node.input
                if name in self.tensors and self.tensors[name].shape == (width,)
            ]
            norm = node.op_type.endswith("LayerNormalization") or (
                node.op_type == "Mul" and len(vectors) == 1
            )
            if norm and vectors:
                if all(self.uses[carrier.tensor] == 1 for carrier in vectors):
                    return Site(x, products, tuple(vectors))
                return Site(x, products)
            if node.op_type == "Mul":
                for name in reversed(node.input):
                    carriers = self._columns(name)
                    if carriers:
                        return Site(x, products, carriers, varying_rows=True)
            if node.op_type == "Slice" and self.readers.get(node.input[0]) == 1:
                node = self.producers.get(node.input[0])
            if node is not None and node.op_type == "GroupQueryAttention":
                return self._values(x, products, node, width)
        return Site(x, products, varying_rows=True)

    def _columns(self, name: str, start: int = 0) -> tuple[Carrier, ...]:
        """The weight (and bias) whose columns are the channels of ``name``, read once."""
        node = self.producers.get(name)
        bias: tuple[Carrier, ...] = ()
        if node is not None and self.readers[name] == 1 and node.op_type == "Add":
            constants = [item for item in node.input if item in self.tensors]
            if len(constants) != 1 or self.uses[constants[0]] != 1:
                return ()
            bias = (Carrier(constants[0], start),)
            name = next(item for item in node.input if item not in self.tensors)
            node = self.producers.get(name)
        if node is None or self.readers[name] != 1 or node.op_type != "MatMul":
            return ()
        weight = node.input[1]
        if weight not in self.tensors or self.uses[weight] != 1:
            return ()
        return (Carrier(weight, start), *bias)

    def _values(self, x: str, products: tuple[Product, ...], attention: Any, width: int) -> Site:
        from onnx import helper

        settings = {item.name: helper.get_attribute_value(item) for item in attention.attribute}
        heads, kv_heads = settings["num_heads"], settings["kv_num_heads"]
        head_dim = width // heads
        packed = not attention.input[2]
        carriers = self._columns(
            attention.input[0] if packed else attention.input[2],
            (heads + kv_heads) * head_dim if packed else 0,
        )
        return Site(x, products, carriers, heads // kv_heads, head_dim, varying_rows=True)


# -- Rewriting -----------------------------------------------------------------------------------


def rewrite(
    network: Network,
    sites: Sequence[Site],
    ranges: dict[str, Float32Array],
    kept: Collection[str] = (),
    bits: int | None = None,
    normed: Collection[str] = (),
) -> Network:
    """The network with scales folded and all products but ``kept`` rounded to ``bits``.

    ranges: the largest magnitude (in,) of each site's channels. kept: products' outputs.
    normed: inputs whose rows are brought to one size. Without bits, only the folding is done.
    """
    import onnx

    tensors = dict(network.tensors)
    replaced: dict[str, list[Any]] = {}
    for site in sites:
        rounded = [item for item in site.products if item.output not in kept and bits]
        own_norm = bool(rounded) and (site.x in normed or not site.carriers)
        if not own_norm and not site.carriers:
            continue
        scaled = rounded if own_norm else list(site.products)
        scales = _scales(site, ranges[site.x], [tensors[item.weight] for item in scaled])
        for item in scaled:
            tensors[item.weight] = tensors[item.weight] * scales[:, None]
        if own_norm:
            tensors[site.x + "_row_norm"] = np.float32(1) / scales
        else:
            _divide(tensors, site, scales)
    for site in sites:
        rounded = [item for item in site.products if item.output not in kept and bits]
        own_norm = bool(rounded) and (site.x in normed or not site.carriers)
        before: list[Any] = []
        x = site.x
        if own_norm:
            before, x = _norm_node(site.x)
        if bits == 8 and rounded:
            quantised = [f"{x}_int8", f"{x}_int8_scale", f"{x}_int8_zero"]
            before.append(onnx.helper.make_node("DynamicQuantizeLinear", [x], quantised))
        for item in rounded:
            output = item.output + "_sized" if own_norm else item.output
            weight = tensors.pop(item.weight)
            make = _int8_product if bits == 8 else _int4_product
            nodes = [*before, make(x, item.weight, weight, output, tensors)]
            before = []
            if own_norm:
                nodes.append(
                    onnx.helper.make_node("Div", [output, f"{site.x}_size"], [item.output])
                )
            replaced[item.output] = nodes
    proto = onnx.ModelProto()
    proto.CopyFrom(network.proto)
    del proto.graph.node[:]
    for node in network.nodes():
        proto.graph.node.extend(replaced.get(node.output[0] if node.output else "", [node]))
    _need_contrib_operators(proto)
    return Network(proto, tensors)


def _scales(site: Site, ranges: Float32Array, weights: Sequence[Array]) -> Float32Array:
    """What each channel (in,) is divided by, around 1; alike for heads that share a value head."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    if site.heads_per_value > 1:
        shape = (-1, site.heads_per_value, site.head_dim)
        ranges, rows = (
            np.broadcast_to(item.reshape(shape).max(axis=1, keepdims=True), item.reshape(shape).shape).reshape(-1)
            for item in (ranges, rows)
        )
    largest = float(ranges.max(initial=0.0))
    floor = max(largest * 1e-4, 1e-20)
    row_floor = max(float(rows.max()) * 1e-4, 1e-20)
    logs = STRENGTH * np.log(np.maximum(ranges, floor)) - (1 - STRENGTH) * np.log(
        np.maximum(rows, row_floor)
    )
    scales: Float32Array = np.exp(logs - logs.mean()).astype(np.float32)
    return scales


def _divide(tensors: dict[str, Array], site: Site, scales: Float32Array) -> None:
    """Divide what carries the scales; a value head's are those of its first query head."""
    if site.heads_per_value > 1:
        scales = scales.reshape(-1, site.heads_per_value, site.head_dim)[:, 0].reshape(-1)
    for carrier in site.carriers:
        changed = tensors[carrier.tensor].copy()
        changed[..., carrier.start : carrier.start + len(scales)] /= scales
        tensors[carrier.tensor] = changed


def _norm_node(x: str) -> tuple[list[Any], str]:
    """x / rms(row) times its norm's weight, and 1 / rms(row) as ``x``_size."""
    from onnx import helper

    output = x + "_rows"
    node = helper.make_node(
        "SimplifiedLayerNormalization",
        [x, x + "_row_norm"],
        [output, x + "_size"],
        axis=-1,
        epsilon=1e-12,
        stash_type=1,
    )
    return [node], output


def round_to_int8(weight: Float32Array) -> tuple[npt.NDArray[np.int8], Float32Array]:
    """The weight (in, out) in whole numbers, and the scale (out,) of each column.

    Plain AVX2 and AVX-512 add two neighbouring products in 16 bits, which saturate: silently
    wrong where 255 times the sum of two weights passes 32,767. The scale keeps every such sum
    within 128, so that the product is exact on every instruction set; halving the whole range
    (onnxruntime's reduce_range) would cost twice as much resolution.
    """
    padded = np.pad(weight, ((0, len(weight) % 2), (0, 0)))
    pairs = padded.reshape(-1, 2, weight.shape[1])
    same_sign = np.maximum(np.maximum(pairs, 0).sum(axis=1), np.maximum(-pairs, 0).sum(axis=1))
    scale = np.maximum(same_sign.max(axis=0) / 127, 1e-30).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


def _int8_product(
    x: str, name: str, weight: Float32Array, output: str, tensors: dict[str, Array]
) -> Any:
    from onnx import helper

    tensors[name + "_int8"], tensors[name + "_scale"] = round_to_int8(weight)
    return helper.make_node(
        "MatMulIntegerToFloat",
        [x + "_int8", name + "_int8", x + "_int8_scale", name + "_scale", x + "_int8_zero"],
        [output],
        domain="com.microsoft",
    )


def _int4_product(
    x: str, name: str, weight: Float32Array, output: str, tensors: dict[str, Array]
) -> Any:
    from onnx import helper

    tensors[name + "_int4"], tensors[name + "_scale"] = round_to_int4(weight)
    return helper.make_node(
        "MatMulNBits",
        [x, name + "_int4", name + "_scale"],
        [output],
        domain="com.microsoft",
        K=weight.shape[0],
        N=weight.shape[1],
        bits=4,
        block_size=INT4_BLOCK,
        accuracy_level=4,
    )


def round_to_int4(weight: Float32Array) -> tuple[npt.NDArray[np.uint8], Float32Array]:
    """The weight (in, out) as MatMulNBits wants it: (out, blocks, block / 2) and scales (n,).

    Each block's scale is the best of a few below the one that reaches its largest value.
    """
    n_in, n_out = weight.shape
    blocks = -(-n_in // INT4_BLOCK)
    padded = np.zeros((n_out, blocks * INT4_BLOCK), dtype=np.float32)
    padded[:, :n_in] = weight.T
    values = padded.reshape(n_out, blocks, INT4_BLOCK)
    # Whole numbers run from -8 to 7, so the largest magnitude is worth -8 of them.
    index = np.abs(values).argmax(axis=2)[..., None]
    full = np.take_along_axis(values, index, axis=2) / -8
    full = np.where(full == 0, np.float32(1e-20), full)
    best_scale, best_error = full, np.full(full.shape, np.inf, dtype=np.float32)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        scale = full * np.float32(share)
        rounded = np.clip(np.rint(values / scale), -8, 7) * scale
        error = np.square(rounded - values).sum(axis=2, keepdims=True)
        best_scale = np.where(error < best_error, scale, best_scale)
        best_error = np.minimum(error, best_error)
    whole = (np.clip(np.rint(values / best_scale), -8, 7) + 8).astype(np.uint8)
    packed = whole[..., 0::2] | (whole[..., 1::2] << 4)
    return packed, best_scale.reshape(-1).astype(np.float32)


def _need_contrib_operators(proto: Any) -> None:
    from onnx import helper

    if all(item.domain != "com.microsoft" for item in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def write_network(network: Network, path: Path) -> None:
    """The graph at ``path`` and its weights beside it, in one file that can be mapped."""
    import onnx

    proto = onnx.ModelProto()
    proto.CopyFrom(network.proto)
    used = {name for node in network.nodes() for name in node.input}
    with path.with_name(path.name + "_data").open("wb") as data:
        for name, array in network.tensors.items():
            if name not in used:
                continue
            if array.nbytes < EXTERNAL_FROM_BYTES:
                proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
                continue
            data.seek(-(-data.tell() // ALIGNMENT) * ALIGNMENT)
            tensor = proto.graph.initializer.add()
            tensor.name = name
            tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            tensor.dims.extend(array.shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            place = {
                "location": path.name + "_data",
                "offset": str(data.tell()),
                "length": str(array.nbytes),
            }
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
            data.write(np.ascontiguousarray(array).tobytes())
    path.write_bytes(proto.SerializeToString())
