"""ONNX file -> what it says, read without the onnx package; the format is protobuf.

Source: onnx/onnx.proto has the field numbers used here and in bench.py.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_eval.errors import ModelError

# Graphs within graphs (If, Loop) deeper than this are no model's.
MAX_DEPTH = 16

_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_ATTRIBUTE, _FUNCTION_NODE = 5, 7
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_SPARSE_TENSORS = (1, 2)
_TENSOR_EXTERNAL = 13
_KEY, _VALUE = 1, 2


def external_files(path: Path) -> list[str]:
    """The files beside an ONNX file that hold its weights, as it names them, sorted.

    Errors: ModelError when the file is no ONNX graph.
    """
    try:
        with path.open("rb") as file:
            model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        parts = list(fields(model))
        graphs = [part for number, part in parts if number == _MODEL_GRAPH]
        nodes = [part for number, part in parts if number == _MODEL_FUNCTIONS]
        if not graphs:
            raise ValueError("no graph in it")
        found: set[str] = set()
        for graph in graphs:
            found.update(_of_graph(graph, 0))
        for function in nodes:
            found.update(_of_nodes(function, _FUNCTION_NODE, 0))
        return sorted(found)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, IndexError, TypeError) as error:
        raise ModelError(f"{path} is not an ONNX graph ({error}): download it again.") from error


def _of_graph(graph: Any, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise ValueError("graphs nested too deep")
    for number, part in fields(graph):
        if number == _GRAPH_INITIALIZER:
            yield from _of_tensor(part)
        elif number == _GRAPH_SPARSE:
            yield from _of_sparse(part)
    yield from _of_nodes(graph, _GRAPH_NODE, depth)


def _of_nodes(owner: Any, node_number: int, depth: int) -> Iterator[str]:
    for number, node in fields(owner):
        if number != node_number:
            continue
        for attribute in (part for field, part in fields(node) if field == _NODE_ATTRIBUTE):
            for field, part in fields(attribute):
                if field in _ATTRIBUTE_TENSORS:
                    yield from _of_tensor(part)
                elif field in _ATTRIBUTE_GRAPHS:
                    yield from _of_graph(part, depth + 1)
                elif field in _ATTRIBUTE_SPARSE:
                    yield from _of_sparse(part)


def _of_sparse(sparse: Any) -> Iterator[str]:
    for number, tensor in fields(sparse):
        if number in _SPARSE_TENSORS:
            yield from _of_tensor(tensor)


def _of_tensor(tensor: Any) -> Iterator[str]:
    for number, part in fields(tensor):
        if number == _TENSOR_EXTERNAL:
            entry = dict(fields(part))
            if bytes(entry[_KEY]) == b"location":
                yield bytes(entry[_VALUE]).decode("utf-8")


def fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message's fields: integers, or bytes as they stand.

    Errors: IndexError or ValueError where the message is cut short or is none.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("not protobuf")

    while at < len(message):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            yield field, varint()
        elif kind in _SIZES or kind == 2:
            size = varint() if kind == 2 else _SIZES[kind]
            if at + size > len(message):
                raise ValueError("cut short")
            yield field, message[at : at + size]
            at += size
        else:
            raise ValueError("not protobuf")


_SIZES = {1: 8, 5: 4}  # bytes of protobuf's fixed-width kinds
