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
    describe_files,
    graphs_of,
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
from exporters.verify import TEMPLATES, measure_directory, single_letter_ids

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

# In the names of an encoder's products: the second of a T5 layer's feed-forward, kept in fp32.
KEPT_IN_T5 = "/wo/"

# A letter's logit may move by this share of the largest when the tables become float16.
TABLE_TOLERANCE = 1e-3

# Initializers from here on live in the data file; large ones on page boundaries, to be mapped.
EXTERNAL_FROM_BYTES = 1024
ALIGNMENT, ALIGNED_FROM_BYTES = 65536, 2**20

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
        if node.op_type == "Shape":
            continue  # reads no value
        for name in node.input:
            counts = uses if name in tensors else readers
            counts[name] = counts.get(name, 0) + 1
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
            if node.op_type == "Reshape" and self.readers.get(node.input[0]) == 1:
                # The channels stay the last axis where their number stays: a vector of as many says.
                node = self.producers.get(node.input[0], node)
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
            np.broadcast_to(
                item.reshape(shape).max(axis=1, keepdims=True), item.reshape(shape).shape
            ).reshape(-1)
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
    """A row over its rms times its norm's weight, and 1 / rms(row) as ``x``_size."""
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
    packed = (whole[..., 0::2] | (whole[..., 1::2] << 4)).astype(np.uint8)
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
            step = ALIGNMENT if array.nbytes >= ALIGNED_FROM_BYTES else 64
            data.seek(-(-data.tell() // step) * step)
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


# -- Measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """A sample prompt on which precisions are compared."""

    input_ids: Int64Array
    letters: tuple[int, ...]  # the places of its options' letters among the ten


def sample_probes(directory: Path, max_length: int) -> tuple[list[Probe], list[Probe]]:
    """Prompts of the bundled sample in all four templates: to calibrate on, and held out."""
    tokenizer = load_tokenizer(directory)
    questions = load_questions(RunConfig(data="sample")).test
    step = len(questions) // N_CHOICE_PROMPTS
    parts = (questions[::step], [q for i, q in enumerate(questions) if i % step])
    found: list[list[Probe]] = []
    for part in parts:
        prompts = [render(q, t) for q, t in zip(part, cycle(TEMPLATES), strict=False)]
        found.append(
            [
                Probe(encoded.input_ids, tuple(map(OPTION_LETTERS.index, prompt.letters)))
                for prompt, encoded in zip(prompts, encode_prompts(tokenizer, prompts), strict=True)
                if 1 < len(encoded.input_ids) <= max_length
            ]
        )
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class Price:
    """What rounding changed in the answers."""

    n_prompts: int
    n_same: int
    kl: float

    @property
    def agreement(self) -> float:
        return self.n_same / self.n_prompts

    def keeps(self, recipe: Recipe, margin: float = 1.0) -> bool:
        """Whether the recipe's promise holds, the divergence being within ``margin`` of its bound."""
        return self.agreement >= recipe.min_agreement and self.kl <= recipe.max_kl * margin


def _log_shares(logits: Float32Array, probe: Probe) -> npt.NDArray[np.float64]:
    values = logits[list(probe.letters)].astype(np.float64)
    values = values - values.max()
    return values - np.log(np.exp(values).sum())


def price_of(
    probes: Sequence[Probe], reference: Sequence[Float32Array], ours: Sequence[Float32Array]
) -> Price:
    """Agreement and divergence of two precisions' letter logits (10,) a prompt."""
    n_same, divergences = 0, []
    for probe, ref_logits, our_logits in zip(probes, reference, ours, strict=True):
        ref, our = _log_shares(ref_logits, probe), _log_shares(our_logits, probe)
        n_same += int(ref.argmax() == our.argmax())
        divergences.append(float((np.exp(ref) * (ref - our)).sum()))
    return Price(len(probes), n_same, float(np.mean(divergences)))


class Gauge:
    """The source model's answers, and its distance to any rounding of it."""

    def __init__(self, model: Model, ids: Sequence[int], probes: Sequence[Probe]) -> None:
        self._model = model
        self._rows = model.head_rows(ids)
        self.probes = probes
        self.reference = [self.read(model, probe) for probe in probes]

    def read(self, model: Model, probe: Probe) -> Float32Array:
        """The ten letters' logits (10,) behind a prompt."""
        return model.logits(model.run(probe.input_ids)[0], self._rows)

    def price(self, network: Network, scratch: Path) -> Price:
        """The price of a rounding, through a session of its own; a decoder's first token apart."""
        write_network(network, scratch / GRAPH)
        manifest = replace(self._model.manifest, first_token_apart=self._model.answers is None)
        session = open_session(scratch / GRAPH, usable_cores())
        model = replace(self._model, session=session, manifest=manifest, first_tokens={})
        return price_of(
            self.probes, self.reference, [self.read(model, probe) for probe in self.probes]
        )


@dataclass(frozen=True, slots=True)
class Activations:
    """What products were given on the calibration prompts, a decoder's first tokens left out."""

    ranges: dict[str, Float32Array]  # input -> the largest magnitude (in,) of each channel
    rows: dict[str, Float32Array]  # input -> some of its rows (n, in)


def observe(
    network: Network, sites: Sequence[Site], model: Model, probes: Sequence[Probe], scratch: Path
) -> Activations:
    """Run the source with the products' inputs as outputs."""
    import onnx

    watched = onnx.ModelProto()
    watched.CopyFrom(network.proto)
    names = [site.x for site in sites]
    known = {output.name for output in watched.graph.output}
    for name in names:
        if name not in known:
            watched.graph.output.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            )
    write_network(Network(watched, network.tensors), scratch / GRAPH)
    n_present = len(model.present_names)
    watching = replace(
        model,
        session=open_session(scratch / GRAPH, usable_cores()),
        present_names=(*model.present_names, *names),
        answers=None,  # the encoder alone, as a decoder without a past
    )
    ranges: dict[str, Float32Array] = {}
    rows: dict[str, list[Float32Array]] = {name: [] for name in names}
    for probe in probes:
        if model.answers is None:
            _, first = model.run(probe.input_ids[:1], keep=True)
            _, outputs = watching.run(probe.input_ids[1:], first, keep=True)
        else:
            _, outputs = watching.run(probe.input_ids, keep=True)
        for name, value in zip(names, outputs[n_present:], strict=True):
            flat = value.reshape(-1, value.shape[-1])
            largest = np.abs(flat).max(axis=0)
            ranges[name] = np.maximum(ranges.get(name, largest), largest)
            some = np.linspace(0, len(flat) - 1, N_ROWS // len(probes) + 1).astype(int)
            rows[name].append(flat[np.unique(some)])
    return Activations(ranges, {name: np.concatenate(parts) for name, parts in rows.items()})


# -- Choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """Which products stay in fp32, and on what grounds."""

    kept: tuple[str, ...]  # products' outputs
    price: Price  # on the prompts the choice was made on


def estimate_errors(
    network: Network, sites: Sequence[Site], activations: Activations, normed: Collection[str]
) -> dict[str, float]:
    """The relative squared error of each product alone, on rows it was given."""
    errors: dict[str, float] = {}
    for site in sites:
        rows = activations.rows[site.x]
        weights = [network.tensors[item.weight] for item in site.products]
        own_norm = site.x in normed or not site.carriers
        sizes: Any = 1.0
        if own_norm:
            sizes = np.sqrt(np.square(rows).mean(axis=1, keepdims=True)) + 1e-20
        scales = _scales(site, activations.ranges[site.x], weights)
        given = rows / sizes / scales
        low, high = min(float(given.min()), 0.0), max(float(given.max()), 0.0)
        step = max((high - low) / 255, 1e-30)
        rounded = np.rint(given / step) * np.float32(step)
        for item, weight in zip(site.products, weights, strict=True):
            whole, scale = round_to_int8(weight * scales[:, None])
            ours = (rounded @ (whole * scale)) * sizes
            exact = rows @ weight
            errors[item.output] = float(
                np.square(ours - exact).sum() / max(np.square(exact).sum(), 1e-30)
            )
    return errors


def choose_kept(
    network: Network,
    sites: Sequence[Site],
    activations: Activations,
    normed: Collection[str],
    recipe: Recipe,
    gauge: Gauge,
    scratch: Path,
) -> Choice:
    """The fewest products to keep, worst first, with which the recipe's promise holds."""

    def try_keeping(n: int) -> Choice:
        kept = tuple(ranked[:n])
        rounded = rewrite(network, sites, activations.ranges, kept, recipe.bits, normed)
        return Choice(kept, gauge.price(rounded, scratch))

    errors = estimate_errors(network, sites, activations, normed)
    ranked = sorted(errors, key=lambda output: -errors[output])
    best = try_keeping(0)
    if not recipe.keep_worst or best.price.keeps(recipe, MARGIN):
        return best
    # Too few and enough; halving what lies between costs a handful of sessions.
    low, high = 0, len(ranked)
    best = try_keeping(high)
    while high - low > 1:
        middle = (low + high) // 2
        choice = try_keeping(middle)
        if choice.price.keeps(recipe, MARGIN):
            high, best = middle, choice
        else:
            low = middle
    return best


# -- The directory -------------------------------------------------------------------------------


def quantize(source: Path, output: Path, precision: str) -> ExportManifest:
    """Write the model directory ``source`` to ``output`` in another precision, its price measured.

    Of an encoder-decoder the encoder is rounded: the decoder's passes are of a few tokens.
    Errors: ExportError for an unknown precision, a source that is not fp32 or holds no product
    with constant weights; then nothing is left at ``output``. ModelError for a source that is
    no model directory.
    """
    recipe = PRECISIONS.get(precision)
    if recipe is None:
        raise ExportError(f"no precision {precision!r}: there are {', '.join(PRECISIONS)}.")
    manifest = read_manifest(source)
    if manifest.precision != "fp32" or manifest.quantization is not None:
        raise ExportError(
            f"{source} is {manifest.precision} already: rounding twice would lose twice. Quantise "
            "the fp32 model directory it was made from."
        )
    verify_hashes(source, manifest)
    with new_directory(output) as directory, tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        graph = graphs_of(manifest)[0]
        network = read_network(source / graph)
        sites = find_sites(network)
        if manifest.encoder_decoder:
            sites = _without_kept(sites)
        if not sites:
            raise ExportError(f"{source / graph} has no product with constant weights to round.")
        model = open_model(source, manifest, usable_cores())
        ids = single_letter_ids(load_tokenizer(source))
        calibration, held_out = sample_probes(source, manifest.max_length)
        if not calibration or not held_out:
            raise ExportError(
                f"no sample prompt fits the {manifest.max_length} tokens of {source}."
            )
        activations = observe(network, sites, model, calibration[:N_RANGE_PROMPTS], scratch)
        normed = {site.x for site in sites if site.varying_rows}
        choice = choose_kept(
            network, sites, activations, normed, recipe, Gauge(model, ids, calibration), scratch
        )
        rounded = rewrite(network, sites, activations.ranges, choice.kept, recipe.bits, normed)
        write_network(rounded, directory / graph)
        _write_tables(source, directory, model, ids, calibration)
        for name in manifest.files:
            if name not in {graph, f"{graph}_data"} and not (directory / name).exists():
                shutil.copyfile(source / name, directory / name)
        ours = replace(
            manifest,
            precision=precision,
            first_token_apart=not manifest.encoder_decoder,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=describe_files(directory, [path.name for path in directory.iterdir()]),
        )
        quantization = _measure(directory, ours, model, ids, held_out)
        quantization |= {
            "products": sum(len(site.products) for site in sites),
            "kept_fp32": sorted(_weight_names(sites, choice.kept)),
            "rows_normed": len(normed),
            "weights": "int8 by column, two neighbours' sum at most 128: exact without VNNI"
            if recipe.bits == 8
            else f"int4, blocks of {INT4_BLOCK}",
            "strength": STRENGTH,
            "n_calibration": min(N_RANGE_PROMPTS, len(calibration)),
            "choice": {
                "n_prompts": choice.price.n_prompts,
                "n_same": choice.price.n_same,
                "kl": choice.price.kl,
            },
            "source_bytes": size_on_disk(manifest),
            "size_bytes": size_on_disk(ours),
            "source_sha256": manifest.files[graph]["sha256"],
        }
        ours = replace(ours, quantization=quantization)
        write_manifest(directory, ours)
        report = measure_directory(directory)
        again = ("logit_max_difference", "logit_scale", "n_same_letter", "past_max_difference")
        parity = {k: v for k, v in manifest.parity.items() if not k.startswith("hidden_")}
        ours = replace(ours, parity=parity | {name: report[name] for name in again})
        write_manifest(directory, ours)
    return ours


def _without_kept(sites: Sequence[Site]) -> list[Site]:
    """The sites without the products that T5's authors keep in fp32, where its values are largest.

    Source: transformers 4.57, modeling_t5.py: _keep_in_fp32_modules.
    """
    return [site for site in sites if not any(KEPT_IN_T5 in item.output for item in site.products)]


def _weight_names(sites: Sequence[Site], outputs: Collection[str]) -> Iterator[str]:
    return (item.weight for site in sites for item in site.products if item.output in outputs)


def _write_tables(
    source: Path, directory: Path, model: Model, ids: Sequence[int], probes: Sequence[Probe]
) -> None:
    """The tables as float16 where the letters' logits stay within TABLE_TOLERANCE, else copied."""
    rows = model.head_rows(ids)
    halved = replace(rows, weight=rows.weight.astype(np.float16).astype(np.float32))
    hiddens = [model.run(probe.input_ids)[0] for probe in probes[:N_RANGE_PROMPTS]]
    exact = np.stack([model.logits(hidden, rows) for hidden in hiddens])
    moved = np.stack([model.logits(hidden, halved) for hidden in hiddens]) - exact
    close = float(np.abs(moved).max()) <= TABLE_TOLERANCE * float(np.abs(exact).max())
    for name in (HEAD, EMBEDDING):
        if not (source / name).is_file():
            continue
        table = model.head if name == HEAD else model.embedding
        if close and table.dtype == np.float32 and _fits_float16(table):
            _save_halved(directory / name, table)
        else:
            shutil.copyfile(source / name, directory / name)


def _blocks(table: Array) -> Iterator[tuple[int, Array]]:
    return ((start, table[start : start + 16384]) for start in range(0, len(table), 16384))


def _fits_float16(table: Array) -> bool:
    largest = float(np.finfo(np.float16).max)
    return all(float(np.abs(block).max()) <= largest for _, block in _blocks(table))


def _save_halved(path: Path, table: Array) -> None:
    """The table (vocab, hidden) in float16, a block of rows at a time."""
    halved = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=table.shape)
    for start, block in _blocks(table):
        halved[start : start + len(block)] = block
    halved.flush()


def _measure(
    directory: Path,
    manifest: ExportManifest,
    source: Model,
    ids: Sequence[int],
    held_out: list[Probe],
) -> dict[str, Any]:
    """Agreement, divergence and speed against the source, prompt by prompt in turn."""
    ours = open_model(directory, manifest, usable_cores())
    answers: tuple[list[Float32Array], list[Float32Array]] = ([], [])
    times: tuple[list[float], list[float]] = ([], [])
    rows = (source.head_rows(ids), ours.head_rows(ids))
    for probe in (held_out[0], held_out[-1], *held_out):
        for place, model in enumerate((source, ours)):
            start = time.perf_counter()
            hidden, _ = model.run(probe.input_ids)
            times[place].append(time.perf_counter() - start)
            answers[place].append(model.logits(hidden, rows[place]))
    price = price_of(held_out, answers[0][2:], answers[1][2:])
    ratios = [slow / fast for slow, fast in zip(times[0][2:], times[1][2:], strict=True)]
    machine = describe_machine()
    return {
        "n_prompts": price.n_prompts,
        "n_same_letter": price.n_same,
        "agreement": price.agreement,
        "mean_kl": price.kl,
        "speed_ratio": float(np.median(ratios)),
        "source_latency_ms": float(np.median(times[0][2:])) * 1e3,
        "latency_ms": float(np.median(times[1][2:])) * 1e3,
        "threads": usable_cores(),
        "processor": machine["cpu_model"],
        "instruction_sets": machine["instruction_sets"],
    }


def verdict(manifest: ExportManifest) -> str:
    """What quantising gained and cost, in words."""
    figures = manifest.quantization or {}
    kept = len(figures["kept_fp32"])
    share = figures["size_bytes"] / figures["source_bytes"]
    ratio = figures["speed_ratio"]
    speed = f"{ratio:.2f} times as fast" if ratio >= 1 else f"slower ({ratio:.2f} times the speed)"
    sets = figures["instruction_sets"] or []
    return (
        f"{manifest.precision} chooses the same letter as fp32 on {figures['n_same_letter']} of "
        f"{figures['n_prompts']} held-out questions (mean KL {figures['mean_kl']:.4f} nats). It is "
        f"{speed} here ({figures['source_latency_ms']:.0f} -> {figures['latency_ms']:.0f} ms a "
        f"question, {figures['threads']} threads, {', '.join(sets) or 'instruction sets unknown'}) and "
        f"takes {share:.0%} of the disk ({figures['size_bytes'] / 1e6:,.0f} MB). "
        f"{kept} of {figures['products']} products stayed in fp32."
    )


def shortfall(manifest: ExportManifest) -> str | None:
    """What the precision promises and this model does not keep, or None."""
    figures = manifest.quantization or {}
    recipe = PRECISIONS[manifest.precision]
    price = Price(figures["n_prompts"], figures["n_same_letter"], figures["mean_kl"])
    if price.keeps(recipe):
        return None
    return (
        f"{manifest.precision} should agree with fp32 on {recipe.min_agreement:.0%} of questions with a "
        f"mean KL of at most {recipe.max_kl:g}; this model has {price.agreement:.1%} and "
        f"{price.kl:.4f}. Report its scores as the quantised model's own, not as the model's."
    )
