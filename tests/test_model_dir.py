"""A model directory is opened whole or not at all, and a message names the file."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_eval.errors import ModelError
from edge_eval.model_dir import (
    MANIFEST,
    describe_files,
    read_manifest,
    sha256_of,
    size_on_disk,
    verify_hashes,
    write_manifest,
)


def copy_model(source: Path, target: Path) -> Path:
    """A copy of a model directory, to be changed."""
    return Path(shutil.copytree(source, target / "copy"))


def seal(directory: Path, **changes: Any) -> Path:
    """Make a changed directory's manifest true again, with ``changes`` to its fields."""
    names = [path.name for path in directory.iterdir() if path.name != MANIFEST]
    edit(directory, files=describe_files(directory, names), **changes)
    return directory


def edit(directory: Path, **changes: Any) -> None:
    """Change the manifest's fields as they stand in the file."""
    path = directory / MANIFEST
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(fields | changes), encoding="utf-8")


def append_byte(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link_outside(path: Path) -> None:
    outside = path.parent.parent / "outside.bin"
    path.rename(outside)
    path.symlink_to(outside)


def test_what_was_written_is_read(tiny_model: Path, tmp_path: Path) -> None:
    manifest = replace(read_manifest(tiny_model), name="نموذج", parity={"found": 1.5})
    directory = copy_model(tiny_model, tmp_path)
    write_manifest(directory, manifest)
    assert read_manifest(directory) == manifest
    assert "نموذج" in (directory / MANIFEST).read_text(encoding="utf-8")


def test_a_size_on_disk_is_that_of_all_files(tiny_model: Path) -> None:
    on_disk = sum(p.stat().st_size for p in tiny_model.iterdir() if p.name != MANIFEST)
    assert size_on_disk(read_manifest(tiny_model)) == on_disk


def test_a_hash_is_the_files_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of(tmp_path / "file") == digest
    assert describe_files(tmp_path, ["file"]) == {"file": {"size_bytes": 3, "sha256": digest}}


@pytest.mark.parametrize("file", ["model.onnx", "lm_head.npy", "embedding.npy", "tokenizer.json"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, append_byte, link_outside])
def test_a_file_that_is_not_whole_is_named(
    damage: Callable[[Path], None], file: str, tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    damage(directory / file)
    with pytest.raises(ModelError) as caught:
        read_manifest(directory)
    assert str(directory / file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.onnx", "lm_head.npy", "embedding.npy", "tokenizer.json"])
def test_a_changed_byte_is_found_by_its_hash(file: str, tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    verify_hashes(directory, read_manifest(directory))
    flip_byte(directory / file)
    with pytest.raises(ModelError, match=rf"{file} is not the file that was exported"):
        verify_hashes(directory, read_manifest(directory))


def test_a_link_to_a_file_of_the_same_folder_is_opened(tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    (directory / "lm_head.npy").rename(directory / "table.npy")
    (directory / "lm_head.npy").symlink_to("table.npy")
    verify_hashes(directory, read_manifest(directory))


@pytest.mark.parametrize(
    "name", ["../outside.bin", "sub/model.bin", "/etc/passwd", "..", ".", "sub/../model.onnx"]
)
def test_a_name_with_a_path_in_it_is_refused(name: str, tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    (tmp_path / "outside.bin").write_bytes(b"abc")
    files = read_manifest(directory).files
    edit(directory, files={**files, name: {"size_bytes": 3, "sha256": ""}})
    with pytest.raises(ModelError, match="is not a plain file name") as caught:
        read_manifest(directory)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("file", ["model.onnx", "lm_head.npy", "tokenizer.json"])
def test_a_manifest_lists_every_file_that_is_needed(
    file: str, tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    files = dict(read_manifest(directory).files)
    del files[file]
    edit(directory, files=files)
    with pytest.raises(ModelError, match=rf"does not list {file}"):
        read_manifest(directory)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_schema_version_is_told_apart_from_damage(
    version: object, tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    edit(directory, schema_version=version)
    with pytest.raises(ModelError, match=r"schema version .* this edge-eval reads"):
        read_manifest(directory)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "null", '{"schema_version": 1}', "\xff\xfe", "[" * 100_000],
    ids=["empty", "open", "list", "number", "null", "no fields", "latin-1", "deep"],
)
def test_a_manifest_that_is_none_is_named(text: str, tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    (directory / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"manifest\.json cannot be read as a manifest") as caught:
        read_manifest(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 7),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("vocab_size", None),
        ("max_length", "1024"),
        ("max_length", True),
        ("tied_embedding", 1),
        ("embedding_scale", "1"),
        ("embedding_scale", float("nan")),
        ("head_softcap", []),
        ("files", []),
        ("files", {"model.onnx": None}),
        ("files", {"model.onnx": {}}),
        ("files", {"model.onnx": {"size_bytes": "many", "sha256": ""}}),
        ("parity", []),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_an_error_of_the_manifest(
    field: str, value: object, tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    edit(directory, **{field: value})
    with pytest.raises(ModelError, match=r"manifest\.json"):
        read_manifest(directory)


def test_a_file_without_a_hash_is_an_error_of_the_manifest(
    tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    files = {
        name: {"size_bytes": f["size_bytes"]} for name, f in read_manifest(directory).files.items()
    }
    edit(directory, files=files)
    with pytest.raises(ModelError, match=r"manifest\.json"):
        verify_hashes(directory, read_manifest(directory))


@pytest.mark.parametrize(
    "field",
    ["schema_version", "source", "architecture", "graph", "files", "parity", "max_length"],
)
def test_a_missing_field_is_named(field: str, tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    fields = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    del fields[field]
    (directory / MANIFEST).write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ModelError, match=field.replace("_", ".")):
        read_manifest(directory)


def test_what_is_no_model_directory_is_told_how_to_become_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no manifest\.json.*edge-eval export"):
        read_manifest(tmp_path)
    for path in (tmp_path / "missing", tmp_path / "config.json"):
        with pytest.raises(ModelError, match=r"is not a folder.*edge-eval export"):
            read_manifest(path)
