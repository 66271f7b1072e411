"""Every file that a graph would read is found, wherever in it the name stands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_eval.errors import ModelError
from edge_eval.onnx_file import external_files

onnx = pytest.importorskip("onnx", reason="graphs are forged with onnx, of the export extra")


def external(location: str) -> Any:
    tensor = onnx.TensorProto(name=location, data_type=1, dims=[1], data_location=1)
    for key, value in (("offset", "0"), ("location", location), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def node(**attributes: Any) -> Any:
    return onnx.helper.make_node("Constant", [], ["x"], **attributes)


def sparse(location: str) -> Any:
    indices = onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [0])
    return onnx.helper.make_sparse_tensor(external(location), indices, [3])


def graph_with(*nodes: Any, **parts: Any) -> Any:
    return onnx.helper.make_graph(list(nodes), "g", [], [], **parts)


def inside(graph: Any, **parts: Any) -> bytes:
    return bytes(onnx.helper.make_model(graph, **parts).SerializeToString())


def deep(n: int) -> Any:
    graph = graph_with(initializer=[external("deep.bin")])
    for _ in range(n):
        graph = graph_with(node(then_branch=graph))
    return graph


def in_function() -> bytes:
    opsets = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function(
        "d", "f", [], ["x"], [node(value=external("f.bin"))], opsets
    )
    return inside(graph_with(), functions=[function])


def in_training() -> bytes:
    model = onnx.helper.make_model(graph_with())
    model.training_info.add().initialization.CopyFrom(graph_with(initializer=[external("t.bin")]))
    return bytes(model.SerializeToString())


PLACES: dict[str, Callable[[], bytes]] = {
    "a.bin": lambda: inside(graph_with(initializer=[external("a.bin")])),
    "سؤال.bin": lambda: inside(graph_with(initializer=[external("سؤال.bin")])),
    "../b.bin": lambda: inside(graph_with(node(value=external("../b.bin")))),
    "several.bin": lambda: inside(graph_with(node(values=[external("several.bin")]))),
    "sparse.bin": lambda: inside(graph_with(sparse_initializer=[sparse("sparse.bin")])),
    "attribute.bin": lambda: inside(graph_with(node(sparse_value=sparse("attribute.bin")))),
    "deep.bin": lambda: inside(deep(10)),
    "f.bin": in_function,
    "t.bin": in_training,
}


@pytest.mark.parametrize("name", PLACES)
def test_a_file_is_found_wherever_it_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(PLACES[name]())
    assert external_files(tmp_path / "g.onnx") == [name]


def test_a_value_before_its_key_is_found_too(tmp_path: Path) -> None:
    content = PLACES["a.bin"]()
    swapped = content.replace(b"\x0a\x08location\x12\x05a.bin", b"\x12\x05a.bin\x0a\x08location")
    assert swapped != content
    (tmp_path / "g.onnx").write_bytes(swapped)
    assert onnx.load(str(tmp_path / "g.onnx"), load_external_data=False)
    assert external_files(tmp_path / "g.onnx") == ["a.bin"]


def test_texts_that_look_like_a_name_are_not_one(tmp_path: Path) -> None:
    raw = b"\x0a\x08location\x12\x05a.bin" + b"\0" * 3
    weight = onnx.helper.make_tensor("w", 1, [5], raw, raw=True)
    (tmp_path / "g.onnx").write_bytes(
        inside(graph_with(initializer=[weight]), doc_string="location")
    )
    assert not external_files(tmp_path / "g.onnx")


def test_an_exported_graph_names_its_weights(tiny_model: Path) -> None:
    assert external_files(tiny_model / "model.onnx") == ["model.onnx_data"]


def test_a_graph_nested_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    content = b"\x0a\0"
    for _ in range(20_000):  # a graph in an attribute of a node of a graph
        content = b"\x32" + size(content) + content
        content = b"\x2a" + size(content) + content
        content = b"\x0a" + size(content) + content
        if len(content) > 60_000:
            break
    (tmp_path / "g.onnx").write_bytes(b"\x3a" + size(content) + content)
    with pytest.raises(ModelError, match="nested too deep"):
        external_files(tmp_path / "g.onnx")


def size(content: bytes) -> bytes:
    n, found = len(content), b""
    while n >= 0x80:
        found, n = found + bytes([n & 0x7F | 0x80]), n >> 7
    return found + bytes([n])


@given(st.binary(max_size=200) | st.integers(0, 10**6).map(lambda n: inside(deep(2))[: n % 200]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_names_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(content)
    try:
        external_files(path)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
