"""Directory <-> ExportManifest: the contract between exporters and edge_eval; files named here.

manifest.json         ExportManifest, with a SHA-256 and size per file
model.onnx(+_data)    from embedded tokens to the last hidden state
encoder.onnx, decoder.onnx(+_data)  in its place where the manifest's kind is encoder-decoder:
                      from the prompt's embedded tokens to its states; from those and the answer's
                      embedded tokens to the last hidden state
lm_head.npy           (vocab, hidden) float32 or float16, memory-mapped
lm_head_bias.npy      (vocab,) where the head has a bias
embedding.npy         (vocab, hidden) where it is not the head's table
first_tokens.npy      (n, ...) float32 where the graph is rounded: a row for each of the manifest's
                      first_token_ids, its keys and values of every layer in the graph's order
tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from edge_eval.errors import ModelError
from edge_eval.onnx_file import external_files
from edge_eval.schema import ExportManifest

MANIFEST = "manifest.json"
GRAPH = "model.onnx"
ENCODER = "encoder.onnx"
DECODER = "decoder.onnx"
HEAD = "lm_head.npy"
HEAD_BIAS = "lm_head_bias.npy"
EMBEDDING = "embedding.npy"
FIRST_PAST = "first_tokens.npy"
TOKENIZER = "tokenizer.json"

UNKNOWN = "unknown"

# Raised when a directory written by an older edge_eval can no longer be read.
SCHEMA_VERSION = 1


def read_manifest(directory: Path) -> ExportManifest:
    """The manifest of a model directory, every file it names checked to be there and whole.

    Errors: ModelError naming what is missing and what to do.
    """
    if not directory.is_dir():
        raise ModelError(
            f"{directory} is not a folder. Make a model directory with "
            "`edge-eval export SOURCE -o DIR`, or try `edge-eval demo`."
        )
    path = directory / MANIFEST
    if not path.is_file():
        raise ModelError(
            f"{directory} is no model directory: it has no {MANIFEST}. Make one with "
            f"`edge-eval export {directory} -o DIR`."
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        if not isinstance(fields, dict):
            raise TypeError("not a JSON object")
        version = fields.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ModelError(
                f"{path} has schema version {str(version)[:20]}, and this edge-eval reads "
                f"{SCHEMA_VERSION}: export the model again, or update edge-eval."
            )
        manifest = _typed(fields)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        # What stands in the file may be of any length, and hold line ends.
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} cannot be read as a manifest: {reason}") from error
    for name, facts in manifest.files.items():
        _check_file(directory, name, int(facts["size_bytes"]))
    needed = (FIRST_PAST,) if manifest.first_token_ids else ()
    for name in (*graphs_of(manifest), HEAD, TOKENIZER, *needed):
        if name not in manifest.files:
            raise ModelError(f"{path} does not list {name}: export the model again.")
    for name in manifest.files:
        if name.endswith(".onnx"):
            _check_graph_files(directory, name, manifest)
    return manifest


def graphs_of(manifest: ExportManifest) -> tuple[str, ...]:
    """The graphs' file names; the first is the one that reads the prompt."""
    return (ENCODER, DECODER) if manifest.encoder_decoder else (GRAPH,)


def _check_graph_files(directory: Path, graph: str, manifest: ExportManifest) -> None:
    """Raise ModelError when a graph reads a file whose hash nobody checks."""
    for name in external_files(directory / graph):
        if name not in manifest.files:
            raise ModelError(
                f"{directory / graph} reads its weights from {name[:80]!r}, which {MANIFEST} does "
                "not list: not opened. Export the model again."
            )


# What a manifest's field may be; a wrong type would surface far from its cause.
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "source": (str,),
    "architecture": (str,),
    "precision": (str,),
    "graph": (str,),
    "n_layers": (int,),
    "hidden_size": (int,),
    "vocab_size": (int,),
    "max_length": (int,),
    "sliding_window": (int, type(None)),
    "tied_embedding": (bool,),
    "embedding_scale": (int, float),
    "head_bias": (bool,),
    "head_scale": (int, float),
    "head_softcap": (int, float, type(None)),
    "files": (dict,),
    "tools": (dict,),
    "parity": (dict,),
    "first_token_apart": (bool,),
    "first_token_ids": (list,),
    "quantization": (dict, type(None)),
    "kind": (str,),
    "decoder_start_ids": (list,),
    "decoder_paper_ids": (list,),
    "trained_length": (int, type(None)),
    "tokenizer": (dict, type(None)),
}


def _typed(fields: dict[str, Any]) -> ExportManifest:
    known = {field.name for field in dataclasses.fields(ExportManifest)} & set(fields)
    required = {
        field.name
        for field in dataclasses.fields(ExportManifest)
        if field.default is dataclasses.MISSING
    }
    missing = sorted(required - known)
    if missing:
        raise KeyError(f"fields missing: {', '.join(missing)}")
    for name, types in _FIELD_TYPES.items():
        if name in known and not isinstance(fields[name], types):
            raise TypeError(f"{name} is {fields[name]!r}")
    for name in ("n_layers", "hidden_size", "vocab_size", "max_length"):
        if isinstance(fields[name], bool) or not 0 < fields[name] < 1 << 31:
            raise ValueError(f"{name} is {fields[name]}")
    for name, facts in fields["files"].items():
        wanted = {"size_bytes": int, "sha256": str}
        if not isinstance(facts, dict) or any(
            not isinstance(facts.get(key), kind) for key, kind in wanted.items()
        ):
            raise TypeError(f"files says {facts!r} of {name!r}")
    values = {name: fields[name] for name in known}
    kind = values.get("kind", "decoder")
    if kind not in {"decoder", "encoder-decoder"}:
        raise ValueError(f"kind is {kind!r}")
    for name in ("decoder_start_ids", "decoder_paper_ids", "first_token_ids"):
        ids = values[name] = tuple(values.get(name, ()))
        if any(not isinstance(i, int) or not 0 <= i < fields["vocab_size"] for i in ids):
            raise ValueError(f"{name} is {list(ids)}")
        if name != "first_token_ids" and bool(ids) != (kind == "encoder-decoder"):
            raise ValueError(f"kind is {kind!r} and {name} {list(ids)}")
    return ExportManifest(**values)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_file(directory: Path, name: str, size_bytes: int) -> None:
    path = directory / name
    if Path(name).name != name or name in {".", ".."}:
        raise ModelError(f"{directory / MANIFEST} names {name!r}, which is not a plain file name.")
    if not path.is_file():
        raise ModelError(f"{path} is missing: export the model again.")
    if not os.access(path, os.R_OK):
        raise ModelError(f"{path} may not be read by you: change whose it is, or its mode.")
    if path.resolve().parent != directory.resolve():
        raise ModelError(f"{path} points outside its folder, to {path.resolve()}: not opened.")
    if path.stat().st_size != size_bytes:
        raise ModelError(
            f"{path} has {path.stat().st_size} bytes and should have {size_bytes}: it was cut "
            "short or changed. Copy or export it again."
        )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Errors: ModelError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error


def _hash_all(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Two at a time: the head and the weights are most of a model, and hashing is slow."""
    names = list(names)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(sha256_of, map(directory.joinpath, names)), strict=True))


def verify_hashes(directory: Path, manifest: ExportManifest) -> None:
    """Raise ModelError when a file's content is not what the manifest says."""
    found = _hash_all(directory, manifest.files)
    for name, facts in manifest.files.items():
        if found[name] != facts["sha256"]:
            raise ModelError(
                f"{directory / name} is not the file that was exported (its SHA-256 differs from "
                f"{MANIFEST}): copy or export it again."
            )


def describe_files(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The manifest's ``files``: size and SHA-256 of each."""
    return {
        name: {"size_bytes": (directory / name).stat().st_size, "sha256": sha256}
        for name, sha256 in _hash_all(directory, sorted(names)).items()
    }


def write_manifest(directory: Path, manifest: ExportManifest) -> None:
    """Write manifest.json; the last file an exporter writes."""
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False, allow_nan=False)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8", newline="\n")


def unknown_manifest(
    name: str, source: str, tools: Mapping[str, str], **known: Any
) -> ExportManifest:
    """The manifest of a model of which no files are here, but for what is ``known`` of it.

    What is not known is marked: text is "unknown", a number 0, anything else False or None.
    """
    fields: dict[str, Any] = {
        "schema_version": 0,
        "revision": None,
        "architecture": UNKNOWN,
        "precision": UNKNOWN,
        "graph": UNKNOWN,
        "n_layers": 0,
        "hidden_size": 0,
        "vocab_size": 0,
        "max_length": 0,
        "sliding_window": None,
        "tied_embedding": False,
        "embedding_scale": 0.0,
        "head_bias": False,
        "head_scale": 0.0,
        "head_softcap": None,
        "files": {},
        "parity": {},
        "created": UNKNOWN,
    }
    return ExportManifest(name=name, source=source, tools=tools, **(fields | known))


def size_on_disk(manifest: ExportManifest) -> int:
    """All of a model directory's files, in bytes."""
    return sum(int(facts["size_bytes"]) for facts in manifest.files.values())
