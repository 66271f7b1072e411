"""A network's products -> whole numbers, and what is done so that little is lost by it.

An int8 product takes its input's scale from the whole tensor, so one large value costs all the
others their resolution. What is done about it changes nothing that the network computes before
rounding:

- each input channel's range is divided out and multiplied into the weight's rows (SmoothQuant);
  the norm before carries the division, or a norm of its own, which brings every row to one size
  and whose product is divided by what it took;
- behind a gate or an activation a few values of a row dwarf the rest: there a rotation spreads
  them over their neighbours, and is undone in the weight's rows (QuaRot);
- a weight's rows are rounded one after the other, what one loses being made good in the rows that
  follow, as far as the inputs seen are alike in both (GPTQ).

Sources: Xiao et al. 2023, SmoothQuant, section 4 (strength alpha); Ashkboos et al. 2024, QuaRot,
section 3; Frantar et al. 2023, GPTQ, algorithm 1; onnxruntime's ContribOperators.md.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from edge_eval.schema import Float32Array
from exporters.calibration import Seen
from exporters.network import Array, Network, Product, Site

# Neighbouring channels that a rotation mixes, at most.
ROTATION = 64

# Added to the diagonal of a Hessian, as a share of its mean: how little the inputs seen are trusted.
DAMPING = 0.01

# Rows rounded before what they lost is carried to all rows behind them at once.
ROWS_AT_ONCE = 128

INT4_BLOCK = 32

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight in whole numbers."""

    whole: Array
    scale: Float32Array


# -- A site's input ------------------------------------------------------------------------------


def row_sizes(rows: Float32Array) -> Float32Array:
    """The root mean square (n, 1) of each row."""
    sizes: Float32Array = np.sqrt(np.square(rows).mean(axis=1, keepdims=True)) + np.float32(1e-20)
    return sizes


def ranges_of(site: Site, seen: Seen) -> Float32Array:
    """The largest magnitude (in,) of each channel in a prompt, its first token left out."""
    rows = seen.rest if site.norm else seen.rest / row_sizes(seen.rest)
    ranges: Float32Array = np.abs(rows).max(axis=0)
    return ranges


def channel_scales(ranges: Float32Array, weights: Sequence[Array], strength: float) -> Float32Array:
    """What each channel (in,) of an input is divided by, around 1.

    strength: how far its range goes to the weight, 0 not at all, 1 altogether.
    """
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    floor = max(float(ranges.max(initial=0.0)) * 1e-4, 1e-20)
    row_floor = max(float(rows.max()) * 1e-4, 1e-20)
    logs = strength * np.log(np.maximum(ranges, floor)) - (1 - strength) * np.log(
        np.maximum(rows, row_floor)
    )
    scales: Float32Array = np.exp(logs - logs.mean()).astype(np.float32)
    return scales


def rotation_of(site: Site, width: int) -> Float32Array:
    """The Hadamard matrix (n, n) that mixes n neighbouring channels of an input; n = 1 for none."""
    size = np.gcd(width, ROTATION) if site.spiked else 1
    return (scipy.linalg.hadamard(size) / np.sqrt(size)).astype(np.float32)


def rotate_rows(matrix: Array, rotation: Float32Array) -> Array:
    """A matrix (in, n) whose rows are mixed as the channels of an input are."""
    if len(rotation) == 1:
        return matrix
    blocks = matrix.reshape(-1, len(rotation), matrix.shape[1])
    return np.matmul(rotation.T.astype(matrix.dtype), blocks).reshape(matrix.shape)


def given_rows(site: Site, rows: Float32Array, scales: Float32Array) -> Float32Array:
    """What the rounded product of a site is given for some rows (n, in) of its input."""
    if not site.norm:
        rows = rows / row_sizes(rows)
    rotation = rotation_of(site, rows.shape[1])
    return np.ascontiguousarray(rotate_rows((rows / scales).T, rotation).T)


def hessian_of(site: Site, seen: Seen) -> Float32Array:
    """The sum (in, in) of a prompt's rows multiplied with themselves, in one size without a norm."""
    rows = np.concatenate([seen.first, seen.rest])
    if not site.norm:
        rows = rows / row_sizes(rows)
    return rows.T @ rows


def compensation(site: Site, hessian: Float32Array, scales: Float32Array) -> Float32Array:
    """How a row's loss is made good in those behind it: the upper factor (in, in) of the inverse."""
    rotation = rotation_of(site, len(scales))
    given = hessian.astype(np.float64) / scales[:, None] / scales
    given = rotate_rows(rotate_rows(given, rotation).T, rotation)
    diagonal = np.einsum("ii->i", given)
    diagonal += DAMPING * max(float(diagonal.mean()), 1e-20)
    factor = scipy.linalg.cho_factor(given, overwrite_a=True)
    inverse = scipy.linalg.cho_solve(factor, np.eye(len(scales)))
    upper: Float64Array = scipy.linalg.cholesky(inverse, overwrite_a=True)
    return upper.astype(np.float32)


# -- Weights -------------------------------------------------------------------------------------


def round_to_int8(weight: Float32Array, upper: Float32Array | None = None) -> Rounded:
    """The weight (in, out) in whole numbers, and the scale (out,) of each column.

    upper: compensation(); without it every value is rounded for itself.

    Plain AVX2 and AVX-512 add two neighbouring products in 16 bits, which saturate: silently
    wrong where 255 times the sum of two weights passes 32,767. The scale keeps every such sum
    within 128, so that the product is exact on every instruction set; halving the whole range
    (onnxruntime's reduce_range) would cost twice as much resolution.
    """
    padded = np.pad(weight, ((0, len(weight) % 2), (0, 0)))
    pairs = padded.reshape(-1, 2, weight.shape[1])
    same_sign = np.maximum(np.maximum(pairs, 0).sum(axis=1), np.maximum(-pairs, 0).sum(axis=1))
    scale = np.maximum(same_sign.max(axis=0) / 127, 1e-30).astype(np.float32)
    if upper is None:
        return Rounded(np.rint(weight / scale).astype(np.int8), scale)
    whole = np.zeros(weight.shape, dtype=np.int8)
    rest = weight.astype(np.float32)
    neighbour = np.zeros(weight.shape[1], dtype=np.float32)
    for start in range(0, len(rest), ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, len(rest))
        losses = np.zeros((end - start, weight.shape[1]), dtype=np.float32)
        for row in range(start, end):
            values = np.rint(rest[row] / scale)
            taken = neighbour if row % 2 else np.float32(0)
            low, high = -128 - np.minimum(taken, 0), 128 - np.maximum(taken, 0)
            neighbour = np.clip(values, np.maximum(low, -127), np.minimum(high, 127))
            whole[row] = neighbour
            losses[row - start] = (rest[row] - neighbour * scale) / upper[row, row]
            rest[row + 1 : end] -= np.outer(upper[row, row + 1 : end], losses[row - start])
        rest[end:] -= upper[start:end, end:].T @ losses
    return Rounded(whole, scale)


def round_to_int4(weight: Float32Array) -> Rounded:
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
    return Rounded(packed, best_scale.reshape(-1).astype(np.float32))


# -- The graph -----------------------------------------------------------------------------------


def fold(network: Network, sites: Sequence[Site], scales: Mapping[str, Float32Array]) -> Network:
    """The network with the scales of a norm's channels in its weight, and out of the products'."""
    tensors = dict(network.tensors)
    for site in sites:
        for name in site.norm:
            tensors[name] = tensors[name] / scales[site.x]
        if site.norm:
            for item in site.products:
                tensors[item.weight] = tensors[item.weight] * scales[site.x][:, None]
    return Network(network.proto, tensors)


def given_weight(
    folded: Network, site: Site, item: Product, scales: Mapping[str, Float32Array]
) -> Float32Array:
    """The weight (in, out) that fits what the rounded product is given."""
    weight: Float32Array = folded.tensors[item.weight]
    if site.norm:
        return weight
    rotation = rotation_of(site, len(weight))
    return rotate_rows(weight * scales[site.x][:, None], rotation)


def replace_products(
    folded: Network,
    sites: Sequence[Site],
    scales: Mapping[str, Float32Array],
    rounded: Mapping[str, Rounded],
    kept: Collection[str] = (),
) -> Network:
    """The folded network with its products rounded, but for the outputs in ``kept``."""
    tensors = dict(folded.tensors)
    replaced: dict[str, list[Any]] = {}
    for site in sites:
        chosen = [item for item in site.products if item.output not in kept]
        if not chosen:
            continue
        before, x = ([], site.x) if site.norm else _own_norm(site, scales[site.x], tensors)
        if any(rounded[item.output].whole.dtype == np.int8 for item in chosen):
            before.append(_node("DynamicQuantizeLinear", [x], [f"{x}_int8", f"{x}_step", f"{x}_0"]))
        for item in chosen:
            output = item.output if site.norm else f"{item.output}_sized"
            weight = tensors.pop(item.weight)
            nodes = [*before, _product(x, item, rounded[item.output], weight, output, tensors)]
            if not site.norm:
                nodes.append(_node("Div", [output, f"{site.x}_size"], [item.output]))
            replaced[item.output] = nodes
            before = []
    nodes = list(_in_place(folded.nodes(), replaced))
    network = folded.with_nodes(nodes, tensors)
    if all(item.domain != "com.microsoft" for item in network.proto.opset_import):
        from onnx import helper

        network.proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return network


def _in_place(nodes: Sequence[Any], replaced: Mapping[str, list[Any]]) -> Iterator[Any]:
    for node in nodes:
        yield from replaced.get(node.output[0] if node.output else "", [node])


def _node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **settings: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, inputs, outputs, **settings)


def _own_norm(site: Site, scales: Float32Array, tensors: dict[str, Array]) -> tuple[list[Any], str]:
    """A row over its root mean square and the scales, rotated; 1 / rms(row) as ``x``_size."""
    x, output = site.x, f"{site.x}_rows"
    tensors[f"{x}_row_norm"] = np.float32(1) / scales
    norm = _node(
        "SimplifiedLayerNormalization",
        [x, f"{x}_row_norm"],
        [output, f"{x}_size"],
        axis=-1,
        epsilon=1e-12,
        stash_type=1,
    )
    rotation = rotation_of(site, len(scales))
    size = len(rotation)
    if size == 1:
        return [norm], output
    tensors[f"rotation_{size}"] = rotation
    tensors[f"blocks_of_{size}"] = np.array([-1, size], dtype=np.int64)
    return [
        norm,
        _node("Shape", [output], [f"{x}_shape"]),
        _node("Reshape", [output, f"blocks_of_{size}"], [f"{x}_blocks"]),
        _node("MatMul", [f"{x}_blocks", f"rotation_{size}"], [f"{x}_mixed"]),
        _node("Reshape", [f"{x}_mixed", f"{x}_shape"], [f"{x}_rotated"]),
    ], f"{x}_rotated"


def _product(
    x: str,
    item: Product,
    rounded: Rounded,
    weight: Float32Array,
    output: str,
    tensors: dict[str, Array],
) -> Any:
    name = item.weight
    tensors[f"{name}_scale"] = rounded.scale
    if rounded.whole.dtype == np.int8:
        tensors[f"{name}_int8"] = rounded.whole
        return _node(
            "MatMulIntegerToFloat",
            [f"{x}_int8", f"{name}_int8", f"{x}_step", f"{name}_scale", f"{x}_0"],
            [output],
            domain="com.microsoft",
        )
    tensors[f"{name}_int4"] = rounded.whole
    return _node(
        "MatMulNBits",
        [x, f"{name}_int4", f"{name}_scale"],
        [output],
        domain="com.microsoft",
        K=weight.shape[0],
        N=weight.shape[1],
        bits=4,
        block_size=INT4_BLOCK,
        accuracy_level=4,
    )


def error_of(
    folded: Network,
    site: Site,
    scales: Mapping[str, Float32Array],
    rounded: Mapping[str, Rounded],
    rows: Float32Array,
) -> dict[str, float]:
    """The relative squared error of each int8 product alone, on rows (n, in) it was given."""
    given = given_rows(site, rows, scales[site.x])
    low, high = min(float(given.min()), 0.0), max(float(given.max()), 0.0)
    step = np.float32(max((high - low) / 255, 1e-30))
    steps = np.rint(given / step) * step
    sizes = 1.0 if site.norm else row_sizes(rows)
    errors = {}
    for item in site.products:
        ours = rounded[item.output]
        exact = (given @ given_weight(folded, site, item, scales)) * sizes
        lost = (steps @ (ours.whole * ours.scale)) * sizes - exact
        errors[item.output] = float(np.square(lost).sum() / max(np.square(exact).sum(), 1e-30))
    return errors
