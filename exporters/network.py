"""A graph on disk <-> its nodes and weights, and the products in it that can be rounded.

What counts as a product is decided here: a MatMul (or plain Gemm) with a constant matrix that
nothing else reads. A Site is an input that products share; it says what stands before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_eval.errors import ExportError

# Products kept one by one are worth less than their shape arithmetic below this many weights.
SMALLEST_PRODUCT = 1024

# Initializers from here on live in the data file; large ones on page boundaries, to be mapped.
EXTERNAL_FROM_BYTES = 1024
ALIGNMENT, ALIGNED_FROM_BYTES = 65536, 2**20

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Network:
    """A graph's nodes and its weights, apart."""

    proto: Any  # ModelProto without initializers
    tensors: dict[str, Array]

    def nodes(self) -> list[Any]:
        return list(self.proto.graph.node)

    def with_nodes(self, nodes: Sequence[Any], tensors: dict[str, Array]) -> "Network":
        """The same graph with other nodes and weights."""
        import onnx

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        return Network(proto, tensors)


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a constant matrix."""

    output: str
    weight: str  # (in, out)


@dataclass(frozen=True, slots=True)
class Site:
    """An input with the products that share it, and what stands before it."""

    x: str
    products: tuple[Product, ...]
    norm: tuple[str, ...] = ()  # weight (and bias) (in,) of a norm that only these products read
    spiked: bool = False  # behind a gate or an activation: a few large values in a row


def read_network(path: Path) -> Network:
    """The graph at ``path``, its Gemm nodes split into product and sum.

    Errors: ExportError when onnx does not read it.
    """
    import onnx

    try:
        proto = onnx.load(str(path))
    except (onnx.checker.ValidationError, ValueError, OSError) as error:
        # onnx also refuses weights that have two names on the disk (hard links).
        reason = " ".join(str(error).split())[:200]
        raise ExportError(
            f"{path} cannot be read for rewriting: {reason} Copy the model directory "
            "file by file, or export it again."
        ) from error
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


def find_sites(network: Network) -> list[Site]:
    """The products' inputs, in the graph's order."""
    tensors = network.tensors
    producers = {name: node for node in network.nodes() for name in node.output}
    uses: dict[str, int] = {}  # of a tensor
    readers: dict[str, int] = {}  # of a computed value
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

    def site(x: str, products: tuple[Product, ...]) -> Site:
        node = producers.get(x)
        if node is not None and node.op_type == "Reshape" and readers.get(node.input[0]) == 1:
            # The channels stay the last axis where their number stays: a vector of as many says.
            node = producers.get(node.input[0], node)
        if node is None:
            return Site(x, products)
        width = tensors[products[0].weight].shape[0]
        vectors = tuple(n for n in node.input if n in tensors and tensors[n].shape == (width,))
        if node.op_type.endswith("LayerNormalization") or (
            node.op_type == "Mul" and len(vectors) == 1
        ):
            alone = readers[x] == len(products) and all(uses[name] == 1 for name in vectors)
            return Site(x, products, vectors if alone else ())
        return Site(x, products, spiked=node.op_type in {"Mul", "Relu"} or "Gelu" in node.op_type)

    return [site(x, tuple(products)) for x, products in by_input.items()]
