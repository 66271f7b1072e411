"""Ordinary ONNX folder, as it is -> ExportManifest and a model; inputs known by name: _FEEDS.

What optimum's text generation, onnxruntime-genai's builder and the Hub's onnx-community write: a
graph from token ids to logits. The head is inside it, so the letters' logits are read from all the
graph's logits of the last position. Files are checked as a model directory's are, but against
nothing: there is no manifest, so one is made from what is found.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_eval.errors import ModelError, OptionError
from edge_eval.model import LetterModel, Past, open_model, open_session
from edge_eval.model_dir import (
    HEAD,
    MANIFEST,
    TOKENIZER,
    UNKNOWN,
    describe_files,
    read_manifest,
    unknown_manifest,
    verify_hashes,
)
from edge_eval.onnx_file import external_files
from edge_eval.schema import ExportManifest, Float32Array, Int64Array

AS_FOUND = "as found"  # the precision in the manifest of such a folder
GENAI = "genai_config.json"

# Looked for in this order where --file names none.
GRAPHS = (
    "model.onnx",
    "onnx/model.onnx",
    "decoder_model_merged.onnx",
    "onnx/decoder_model_merged.onnx",
)

# A prompt's length where no configuration states one.
FALLBACK_MAX_LENGTH = 2048

# Of the logits' spread: how far a prompt continued from its half may be from the whole one. A
# lost mask is as far off as another prompt (1); int8 activations, rounded anew, by a few hundredths.
MAX_CONTINUED = 0.2
PROBE_TOKENS, PROBE_IDS = 24, 256

_DTYPES: dict[str, Any] = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
}

# What each input is fed, of the ids (seq,) to run and the tokens behind them; scalars may be (1,).
_FEEDS: dict[str, Callable[[Int64Array, int], npt.NDArray[Any]]] = {
    "input_ids": lambda ids, _: ids[None],
    "attention_mask": lambda ids, n_past: np.ones((1, n_past + len(ids))),
    "position_ids": lambda ids, n_past: np.arange(n_past, n_past + len(ids))[None],
    "cache_position": lambda ids, n_past: np.arange(n_past, n_past + len(ids)),
    "token_type_ids": lambda ids, _: np.zeros((1, len(ids))),
    "use_cache_branch": lambda _, n_past: np.asarray(n_past > 0),
    "num_logits_to_keep": lambda *_: np.asarray(1),
    "logits_to_keep": lambda *_: np.asarray(1),
}
_SCALARS = ("use_cache_branch", "num_logits_to_keep", "logits_to_keep")


def read_any_manifest(directory: Path, file: str = "", *, hashes: bool = False) -> ExportManifest:
    """The manifest of a model directory, or one made for an ONNX folder taken as it is.

    hashes: compare a model directory's files with its manifest; a folder's are only noted down.
    Errors: ModelError naming what is missing and what to do, OptionError for a file that is not
    the folder's.
    """
    ours = any((directory / name).exists() for name in (MANIFEST, HEAD))
    if ours or not (file or find_graphs(directory)):
        if file:
            raise OptionError(
                f"--file {file} chooses a graph of an ONNX folder, and {directory} is a model "
                "directory or no folder: leave --file out."
            )
        manifest = read_manifest(directory)
        if hashes:
            verify_hashes(directory, manifest)
        return manifest
    return describe_folder(directory, file)


def is_as_found(manifest: ExportManifest) -> bool:
    """Whether a manifest was made for an ONNX folder as it is."""
    return manifest.precision == AS_FOUND and manifest.schema_version == 0


def open_any_model(directory: Path, manifest: ExportManifest, threads: int) -> LetterModel:
    """The model behind a manifest of read_any_manifest(), with ``threads`` for one pass.

    Errors: ModelError when it cannot be loaded or run.
    """
    if is_as_found(manifest):
        return open_folder(directory, manifest, threads)
    return open_model(directory, manifest, threads)


# ---- what is in the folder


def find_graphs(directory: Path) -> list[str]:
    """The ONNX files of a folder and of its subfolder onnx, as --file would name them."""
    return [
        path.relative_to(directory).as_posix()
        for pattern in ("*.onnx", "onnx/*.onnx")
        for path in sorted(directory.glob(pattern))
    ]


def describe_folder(directory: Path, file: str = "") -> ExportManifest:
    """A manifest of an ONNX folder as it is: its files, and the limits its configuration states.

    Errors: ModelError for what is missing, is an encoder-decoder or points outside the folder;
    OptionError where ``file`` must be given or is not there.
    """
    graph = _choose_graph(directory, file)
    settings = _read_settings(directory, (directory / graph).parent)
    if settings.get("is_encoder_decoder"):
        raise ModelError(
            f"{directory} is an encoder-decoder, which cannot be run from an ONNX folder: export "
            "its checkpoint with `edge-eval export CHECKPOINT -o DIR`."
        )
    if not (directory / TOKENIZER).is_file():
        raise ModelError(
            f"{directory} has no {TOKENIZER}, so prompts cannot be turned into token ids: put the "
            "checkpoint's there, and name the folder that holds it (a graph below it with --file)."
        )
    names = [graph]
    beside = Path(graph).parent
    names += [(beside / name).as_posix() for name in external_files(_inside(directory, graph))]
    names += [
        name
        for name in (
            TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "config.json", GENAI
        )
        if (directory / name).is_file()
    ]  # fmt: skip
    for name in names:
        _inside(directory, name)
    # A multimodal model's limits are its language model's.
    nested = settings.get("text_config")
    settings = settings | (nested if isinstance(nested, dict) else {})
    vocab_size = _count(settings, "vocab_size")
    if not vocab_size:
        raise ModelError(
            f"{directory} does not say how many tokens the model knows (vocab_size in config.json "
            f"or {GENAI}): add the checkpoint's config.json."
        )
    return unknown_manifest(
        directory.resolve().name + (f" {Path(file).stem}" if file else ""),
        directory.resolve().name,
        {},
        architecture=str(settings.get("model_type", UNKNOWN)),
        precision=AS_FOUND,
        graph=graph,
        n_layers=_count(settings, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=_count(settings, "hidden_size", "n_embd"),
        vocab_size=vocab_size,
        max_length=_count(settings, "max_position_embeddings", "n_positions", "seq_length")
        or FALLBACK_MAX_LENGTH,
        sliding_window=_sliding_window(settings),
        embedding_scale=1.0,
        files=describe_files(directory, dict.fromkeys(names)),
    )


def _choose_graph(directory: Path, file: str) -> str:
    found = find_graphs(directory)
    if file:
        if Path(file).is_absolute() or not (directory / file).is_file():
            raise OptionError(
                f"{directory} has no {file}: --file takes {_one_of(found)}."
                if found
                else f"{directory} has no {file}."
            )
        return Path(file).as_posix()
    named = _read_json(directory / GENAI).get("model", {})
    for part in ("decoder", "filename"):
        named = named.get(part, {}) if isinstance(named, dict) else {}
    if isinstance(named, str) and named in found:
        return named
    chosen = [name for name in GRAPHS if name in found] or found
    if len(chosen) > 1 and chosen == found:
        raise OptionError(f"{directory} has several graphs: choose with --file, {_one_of(found)}.")
    return chosen[0]


def _one_of(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" or " if len(names) > 1 else "") + names[-1]


def _inside(directory: Path, name: str) -> Path:
    """A file of the folder, proved to be there and in it.

    Errors: ModelError.
    """
    path = directory / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{directory} names {name}, which lies outside the folder: not opened.")
    if not path.is_file():
        raise ModelError(f"{path} is missing: download or export the folder again, whole.")
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ModelError(
            f"{path} points outside its folder, to {path.resolve()}: not opened. A folder of files "
            "instead of links comes with `hf download ID --local-dir DIR`."
        )
    return path


def _read_settings(directory: Path, beside: Path) -> dict[str, Any]:
    """config.json's settings, else what genai_config.json says in the same words.

    Errors: ModelError when there is neither.
    """
    settings: dict[str, Any] = {}
    genai = _read_json(directory / GENAI).get("model", {})
    if isinstance(genai, dict) and genai:
        decoder = genai.get("decoder", {})
        settings = dict(decoder) if isinstance(decoder, dict) else {}
        window = settings.pop("sliding_window", None)
        settings |= {
            "model_type": genai.get("type"),
            "vocab_size": genai.get("vocab_size"),
            "max_position_embeddings": genai.get("context_length"),
            "sliding_window": window.get("window_size") if isinstance(window, dict) else None,
        }
    for folder in dict.fromkeys((beside, directory)):
        settings |= _read_json(folder / "config.json")
    if not settings:
        raise ModelError(
            f"{directory} has neither config.json nor {GENAI}, so the model's limits are unknown: "
            "add the checkpoint's config.json."
        )
    return settings


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("not a JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return value


def _count(settings: dict[str, Any], *names: str) -> int:
    """The first positive number under these names; 0 for none."""
    values = [settings.get(name) for name in names]
    return next((v for v in values if type(v) is int and 0 < v < 1 << 31), 0)


def _sliding_window(settings: dict[str, Any]) -> int | None:
    layer_types = settings.get("layer_types")
    if settings.get("use_sliding_window") is False:
        return None
    if isinstance(layer_types, list) and "sliding_attention" not in layer_types:
        return None
    return _count(settings, "sliding_window") or None


# ---- the graph


@dataclass(frozen=True, slots=True)
class PastInput:
    """One input of keys, values or another state, and the output it is taken from."""

    name: str
    present: str
    shape: tuple[int, ...]  # before any token
    dtype: Any
    axis: int | None  # of the tokens; None where the state's size is fixed


@dataclass(frozen=True, slots=True)
class LogitsModel:
    """An ONNX folder's graph, opened. The state behind a prompt is its logits, (vocab,).

    Thread-safe. Where the graph takes no past, or does not continue a prompt from it faithfully,
    what is kept is the ids themselves, and a continued prompt is run whole.
    """

    manifest: ExportManifest
    session: Any
    inputs: tuple[tuple[str, Any, int], ...]  # name, type, rank; without past
    past_inputs: tuple[PastInput, ...]
    n_logits: int
    continues: bool
    load_s: float

    def answering_behind(self, input_ids: Sequence[int]) -> "LogitsModel":  # noqa: ARG002 - one signature
        """Itself: a decoder alone is given nothing but the prompt."""
        return self

    def run(
        self, input_ids: Int64Array, past: Past | None = None, *, keep: bool = False
    ) -> tuple[Float32Array, Past]:
        """The logits (vocab,) behind ``input_ids`` (seq,), continued from ``past``.

        With ``keep`` the second value is what to continue from, else empty.
        """
        if not self.continues:
            whole = np.concatenate([past[0], input_ids]) if past else input_ids
            return self._pass(whole, None, keep=False)[0], (whole,) if keep else ()
        return self._pass(input_ids, past, keep=keep)

    def _pass(
        self, input_ids: Int64Array, past: Past | None, *, keep: bool
    ) -> tuple[Float32Array, Past]:
        n_past = 0
        if past:
            n_past = next(
                array.shape[item.axis]
                for item, array in zip(self.past_inputs, past, strict=True)
                if item.axis is not None
            )
        feeds = {}
        for name, dtype, rank in self.inputs:
            value = _FEEDS[name](input_ids, n_past)
            value = value.reshape((1,) * rank) if name in _SCALARS else value
            feeds[name] = value.astype(dtype, copy=False)
        for index, item in enumerate(self.past_inputs):
            feeds[item.name] = past[index] if past else np.zeros(item.shape, item.dtype)
        names = ["logits", *(item.present for item in self.past_inputs if keep)]
        try:
            logits, *present = self.session.run(names, feeds)
        except Exception as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ModelError(f"a forward pass of {self.manifest.graph} fails: {reason}.") from error
        # Of all positions or of the last alone, with the batch's axis or without; a copy, since
        # a view would hold the logits of every position.
        last = logits.reshape(-1, logits.shape[-1])[-1]
        return np.array(last, dtype=np.float32), tuple(present)

    def logits(self, hidden: Float32Array, rows: Int64Array) -> Float32Array:
        """The logits (n,) of the rows' tokens, out of all of them."""
        chosen: Float32Array = hidden[rows]
        return chosen

    def head_rows(self, token_ids: Sequence[int]) -> Int64Array:
        """Where some tokens' logits stand."""
        return np.asarray(token_ids, dtype=np.int64)

    def all_logits(self, hidden: Float32Array) -> Float32Array:
        """The logits (vocab,) of every token."""
        return hidden

    def logits_in_blocks(self, hidden: Float32Array) -> Iterator[Float32Array]:
        """The logits (prompts, vocab) of every token, in one block."""
        yield hidden


def open_folder(directory: Path, manifest: ExportManifest, threads: int) -> LogitsModel:
    """Load an ONNX folder's graph, its ends understood and two short prompts run through it.

    Errors: ModelError when onnxruntime cannot load or run it, or edge-eval cannot feed it.
    """
    start = time.perf_counter()
    path = directory / manifest.graph
    session = open_session(path, threads)
    load_s = time.perf_counter() - start
    outputs = {node.name: node.type for node in session.get_outputs()}
    if "logits" not in outputs:
        raise ModelError(
            f"{path} gives {', '.join(list(outputs)[:3])}, not logits: it was exported for another "
            "task than text generation."
        )
    inputs, past_inputs = [], []
    for node in session.get_inputs():
        dtype = _dtype(path, node.name, node.type)
        if node.name.startswith("past"):
            past_inputs.append(_past_input(path, node, dtype, outputs))
        elif node.name in _FEEDS:
            _check_ends(path, node)
            inputs.append((node.name, dtype, len(node.shape)))
        else:
            raise ModelError(
                f"{path} takes {node.name}, which edge-eval does not know how to feed: it is a graph "
                "of another kind, or a part of a model. Export the checkpoint with `edge-eval export "
                "CHECKPOINT -o DIR`."
            )
    if "input_ids" not in [name for name, _, _ in inputs]:
        raise ModelError(f"{path} takes no input_ids: it is not a whole language model.")
    _dtype(path, "logits", outputs["logits"])
    found = LogitsModel(manifest, session, tuple(inputs), tuple(past_inputs), 0, True, load_s)
    n_logits, continues = _probe(found)
    if n_logits < manifest.vocab_size:
        raise ModelError(
            f"{path} gives {n_logits} logits and {directory} states a vocabulary of "
            f"{manifest.vocab_size}: the files belong to different models."
        )
    return LogitsModel(
        manifest, session, tuple(inputs), tuple(past_inputs), n_logits, continues, load_s
    )


def _dtype(path: Path, name: str, kind: str) -> Any:
    if kind not in _DTYPES:
        what = kind.removeprefix("tensor(").removesuffix(")")
        raise ModelError(
            f"{path} has {name} in {what}, which does not run on a CPU here: take the fp32, fp16, "
            "int8 or int4 graph of this model."
        )
    return _DTYPES[kind]


def _check_ends(path: Path, node: Any) -> None:
    """Raise ModelError when an input is made for one length or for several prompts at once."""
    wanted = {"input_ids": 2, "attention_mask": 2, "position_ids": 2, "token_type_ids": 2}
    rank = wanted.get(node.name)
    if rank is None:
        return
    fixed = [size for size in node.shape[1:] if isinstance(size, int)]
    if len(node.shape) != rank or fixed or node.shape[0] not in (1, *_symbols(node)):
        raise ModelError(
            f"{path} takes {node.name} of shape {list(node.shape)}, not of one prompt of any "
            "length: export it with dynamic axes."
        )


def _symbols(node: Any) -> list[Any]:
    return [size for size in node.shape if not isinstance(size, int)]


def _past_input(path: Path, node: Any, dtype: Any, outputs: dict[str, str]) -> PastInput:
    rest = node.name.removeprefix("past_key_values").removeprefix("past")
    present = next((n for n in (f"present{rest}", f"present_key_values{rest}") if n in outputs), "")
    # The first axis is the batch's; the other of any size counts the tokens.
    open_axes = [axis for axis, size in enumerate(node.shape) if axis and not isinstance(size, int)]
    if not present or len(open_axes) > 1 or node.shape[0] not in (1, *_symbols(node)):
        raise ModelError(
            f"{path} takes {node.name} of shape {list(node.shape)}"
            + (f", for which it has no output present{rest}" if not present else "")
            + ": keys and values in a form that edge-eval does not know. Export the checkpoint with "
            "`edge-eval export CHECKPOINT -o DIR`."
        )
    shape = tuple(size if isinstance(size, int) else 0 for size in node.shape)
    return PastInput(
        node.name, present, (1, *shape[1:]), dtype, open_axes[0] if open_axes else None
    )


def _probe(model: LogitsModel) -> tuple[int, bool]:
    """How many logits a pass gives, and whether a prompt may be continued from its half."""
    rng = np.random.default_rng(0)
    n = min(PROBE_TOKENS, model.manifest.max_length)
    # Low ones, which any vocabulary has: the configuration may be another model's.
    ids = rng.integers(0, min(PROBE_IDS, model.manifest.vocab_size), n, dtype=np.int64)
    whole, _ = model.run(ids)
    if not any(item.axis is not None for item in model.past_inputs) or n < 2:
        return len(whole), False
    _, past = model.run(ids[: n // 2], keep=True)
    try:
        continued, _ = model.run(ids[n // 2 :], past)
    except ModelError:  # some take one token at a time behind a past
        return len(whole), False
    with np.errstate(all="ignore"):  # not finite: not faithful
        off, spread = np.linalg.norm(continued - whole), np.linalg.norm(whole - whole.mean())
    return len(whole), bool(off <= MAX_CONTINUED * spread)
