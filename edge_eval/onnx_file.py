"""ONNX file -> what it says, read without the onnx package; the format is protobuf.

Source: onnx/onnx.proto has the field numbers used here and in bench.py.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_eval.errors import ModelError

# Message -> number of a field that leads to a tensor -> the message it holds.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_MODEL_GRAPH = 7
_KEY, _VALUE = 1, 2  # of an entry
MAX_DEPTH = 100  # of messages in messages: protobuf's own limit


def external_files(path: Path) -> list[str]:
    """The files beside an ONNX file that hold its weights, as it names them, sorted.

    Errors: ModelError when the file is no ONNX graph.
    """
    try:
        with path.open("rb") as file:
            model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if all(number != _MODEL_GRAPH for number, _ in fields(model)):
            raise ValueError("no graph in it")
        return sorted(set(_locations(model, "model", 0)))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, IndexError, TypeError) as error:
        raise ModelError(f"{path} is not an ONNX graph ({error}): download it again.") from error


def _locations(message: memoryview, kind: str, depth: int) -> Iterator[str]:
    """What a message's tensors name, wherever in it they stand: onnxruntime opens them all."""
    if depth > MAX_DEPTH:
        raise ValueError("messages nested too deep")
    for number, part in fields(message):
        inner = _MESSAGES[kind].get(number)
        if inner is None or isinstance(part, int):
            continue
        if inner != "entry":
            yield from _locations(part, inner, depth + 1)
            continue
        entry = dict(fields(part))  # of two the last counts, as to any reader
        if bytes(entry.get(_KEY, b"")) == b"location":
            yield bytes(entry.get(_VALUE, b"")).decode("utf-8")


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
