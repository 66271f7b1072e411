"""EncodedPrompt -> last hidden state -> LetterLogits; the only module that uses onnxruntime.

The graph ends before the vocabulary: numpy gathers the rows of the head that spell the letters
and multiplies them with the last hidden state. Change a session's options in open_model().
"""

import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_eval.errors import ModelError
from edge_eval.model_dir import (
    DECODER,
    EMBEDDING,
    ENCODER,
    FIRST_PAST,
    GRAPH,
    HEAD,
    HEAD_BIAS,
    MANIFEST,
)
from edge_eval.schema import (
    ExportManifest,
    Float32Array,
    GeneratedText,
    Int64Array,
    LetterLogits,
)

# Keys and values of every layer, in the graph's own order: (1, kv_heads, past, head_dim) each. Of an
# encoder-decoder: the prompt's states (1, seq, hidden) and the ids its decoder has been given.
Past = tuple[Any, ...]

# First tokens whose keys and values are kept where they are run apart: BOS, or a prompt's few
# first words; a few dozen kilobytes each.
FIRST_TOKENS = 64

# Rows of the embedding read before their pages are let go: some 64 KB are mapped for each.
ROWS_AT_ONCE = 64

# Rows of the head multiplied at once when the whole vocabulary is asked for: 64 MB at 1,024 wide.
HEAD_BLOCK = 16384


class LetterModel(Protocol):
    """What a LetterReader needs: a pass to a state, and from a state to logits.

    Model below ends at the last hidden state; the state of onnx_folder.py is the logits themselves.
    """

    @property
    def manifest(self) -> ExportManifest: ...

    @property
    def load_s(self) -> float: ...

    @property
    def n_logits(self) -> int:
        """How many tokens have logits."""

    @property
    def continues(self) -> bool:
        """Whether going on from what is kept spares computing it again."""

    def answering_behind(self, input_ids: Sequence[int]) -> "LetterModel":
        """The same model, an encoder-decoder's decoder given these ids before the answer."""

    def run(
        self, input_ids: Int64Array, past: Past | None = None, *, keep: bool = False
    ) -> tuple[Float32Array, Past]: ...

    def head_rows(self, token_ids: Sequence[int]) -> Any: ...

    def logits(self, hidden: Float32Array, rows: Any) -> Float32Array: ...

    def all_logits(self, hidden: Float32Array) -> Float32Array: ...

    def logits_in_blocks(self, hidden: Float32Array) -> Iterator[Float32Array]: ...


@dataclass(frozen=True, slots=True)
class AnswerDecoder:
    """The half of an encoder-decoder that answers, and what it is given before the answer."""

    session: Any
    input_ids: Int64Array  # (n,)


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model directory. Thread-safe: a session may run in several threads at once."""

    manifest: ExportManifest
    session: Any
    embedding: npt.NDArray[Any]  # (vocab, hidden), memory-mapped
    head: npt.NDArray[Any]  # (vocab, hidden), memory-mapped; the embedding itself when tied
    head_bias: npt.NDArray[Any] | None  # (vocab,)
    input_names: tuple[str, ...]
    past_inputs: tuple[tuple[str, tuple[int, int]], ...]  # name -> kv_heads, head_dim
    present_names: tuple[str, ...]
    load_s: float
    first_tokens: dict[int, Past] = field(default_factory=dict, compare=False, repr=False)
    answers: AnswerDecoder | None = None  # of an encoder-decoder, whose encoder is the session
    mapped: tuple[mmap.mmap, ...] = ()  # what the tables are views of

    def run(
        self, input_ids: Int64Array, past: Past | None = None, *, keep: bool = False
    ) -> tuple[Float32Array, Past]:
        """The last hidden state (hidden,) behind ``input_ids`` (seq,), continued from ``past``.

        With ``keep`` the second value is the keys and values to continue from, else empty.
        """
        if self.answers is not None:
            return self._run_both(self.answers, input_ids, past)
        if self.manifest.first_token_apart and not past and len(input_ids) > 1:
            past = self._first_token(input_ids[:1])
            input_ids = input_ids[1:]
        n_past = past[0].shape[2] if past else 0
        feeds: dict[str, Any] = {"inputs_embeds": self._embed(input_ids)}
        if "attention_mask" in self.input_names:
            feeds["attention_mask"] = np.ones((1, n_past + len(input_ids)), dtype=np.int64)
        if "position_ids" in self.input_names:
            feeds["position_ids"] = np.arange(n_past, n_past + len(input_ids), dtype=np.int64)[None]
        for index, (name, (kv_heads, head_dim)) in enumerate(self.past_inputs):
            feeds[name] = past[index] if past else _no_past(kv_heads, head_dim)
        outputs = ["last_hidden_state", *(self.present_names if keep else ())]
        hidden, *present = self._pass(self.session, GRAPH, outputs, feeds)
        last: Float32Array = hidden[0, -1]
        return last, tuple(present)

    def _run_both(
        self, answers: AnswerDecoder, input_ids: Int64Array, past: Past | None
    ) -> tuple[Float32Array, Past]:
        """run() of an encoder-decoder: what continues ``past`` is the answer, never the prompt."""
        outputs = ["last_hidden_state"]
        if past:
            states, given = past[0], np.concatenate([past[1], input_ids])
        else:
            feeds = {"inputs_embeds": self._embed(input_ids)}
            states, given = self._pass(self.session, ENCODER, outputs, feeds)[0], answers.input_ids
        feeds = {"inputs_embeds": self._embed(given), "encoder_hidden_states": states}
        hidden: Float32Array = self._pass(answers.session, DECODER, outputs, feeds)[0][0, -1]
        return hidden, (states, given)

    def _embed(self, input_ids: Int64Array) -> Float32Array:
        """The rows (1, seq, hidden) of the embedding table."""
        rows = np.empty((len(input_ids), self.embedding.shape[1]), dtype=np.float32)
        for start in range(0, len(input_ids), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            rows[some] = self.embedding[input_ids[some]]
            self._let_go()
        if self.manifest.embedding_scale != 1.0:
            rows = rows * np.float32(self.manifest.embedding_scale)
        return rows[None]

    def _pass(self, session: Any, name: str, outputs: list[str], feeds: dict[str, Any]) -> Any:
        """A graph's outputs, the first of them hidden states of the manifest's width."""
        try:
            found = session.run(outputs, feeds)
        except Exception as error:
            raise ModelError(
                f"a forward pass of {name} fails: {_first_line(error)}. Export the model again."
            ) from error
        if found[0].shape[-1] != self.manifest.hidden_size:
            raise ModelError(
                f"{name} gives hidden states of width {found[0].shape[-1]} and the manifest says "
                f"{self.manifest.hidden_size}: the files belong to different models."
            )
        return found

    def answering_behind(self, input_ids: Sequence[int] | Int64Array) -> "Model":
        """The same encoder-decoder, its decoder given other ids first; a decoder alone as it is."""
        if self.answers is None:
            return self
        given = np.asarray(input_ids, dtype=np.int64)
        return replace(self, answers=replace(self.answers, input_ids=given))

    def _first_token(self, first_id: Int64Array) -> Past:
        """The keys and values behind a prompt's first token (1,), computed once for each id."""
        token_id = int(first_id[0])
        past = self.first_tokens.get(token_id)
        if past is None:
            # Two threads may both compute it, to the same end.
            _, past = self.run(first_id, keep=True)
            if len(self.first_tokens) < FIRST_TOKENS:
                self.first_tokens[token_id] = past
        return past

    @property
    def n_logits(self) -> int:
        return len(self.head)

    @property
    def continues(self) -> bool:
        return self.answers is None  # an encoder reads a prompt from both ends

    def logits(self, hidden: Float32Array, rows: "HeadRows") -> Float32Array:
        """The logits (n,) of the rows' tokens behind a last hidden state (hidden,)."""
        with np.errstate(invalid="ignore", over="ignore"):  # not finite: INVALID, told there
            products: Float32Array = rows.weight @ hidden
            return self._after_head(products, rows.bias)

    def head_rows(self, token_ids: Sequence[int]) -> "HeadRows":
        """The head's rows for some tokens, copied into memory once."""
        ids = np.asarray(token_ids, dtype=np.int64)
        bias = None if self.head_bias is None else self.head_bias[ids].astype(np.float32)
        rows = HeadRows(self.head[ids].astype(np.float32), bias)
        self._let_go()
        return rows

    def all_logits(self, hidden: Float32Array) -> Float32Array:
        """The logits (vocab,) of every token: reads the whole head, so only when asked for."""
        logits: Float32Array = np.concatenate(list(self.logits_in_blocks(hidden[None])), axis=1)[0]
        return logits

    def logits_in_blocks(self, hidden: Float32Array) -> Iterator[Float32Array]:
        """The logits (prompts, block) of every token, a block of the vocabulary at a time."""
        for start in range(0, len(self.head), HEAD_BLOCK):
            rows = self.head[start : start + HEAD_BLOCK].astype(np.float32, copy=False)
            bias = self.head_bias
            logits = self._after_head(
                hidden @ rows.T, None if bias is None else bias[start : start + HEAD_BLOCK]
            )
            self._let_go()
            yield logits

    def _let_go(self) -> None:
        """Unmap the tables' pages: with each row read the system maps some 64 KB around it."""
        for mapped in self.mapped:
            if hasattr(mapped, "madvise"):  # not on Windows
                mapped.madvise(mmap.MADV_DONTNEED)

    def _after_head(self, logits: Float32Array, bias: npt.NDArray[Any] | None) -> Float32Array:
        if bias is not None:
            logits = logits + bias
        if self.manifest.head_scale != 1.0:
            logits = logits * np.float32(self.manifest.head_scale)
        cap = self.manifest.head_softcap
        if cap is None:
            return logits
        capped: Float32Array = np.float32(cap) * np.tanh(logits / np.float32(cap))
        return capped


@dataclass(frozen=True, slots=True)
class HeadRows:
    weight: Float32Array  # (n, hidden)
    bias: Float32Array | None  # (n,)


def _no_past(kv_heads: int, head_dim: int) -> Float32Array:
    return np.zeros((1, kv_heads, 0, head_dim), dtype=np.float32)


def open_session(path: Path, threads: int) -> Any:
    """An onnxruntime session of a graph, as every pass of edge-eval is run.

    Errors: ModelError when onnxruntime cannot load it.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # A pattern is remembered per input shape, and every prompt has its own length.
    options.enable_mem_pattern = False
    options.log_severity_level = 4  # an error is raised as well, and raised once is enough
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(
            f"onnxruntime {ort.__version__} cannot load {path}: "
            f"{_first_line(error)}. Export the model again, or update onnxruntime."
        ) from error


def open_model(directory: Path, manifest: ExportManifest, threads: int) -> Model:
    """Load a model directory whose manifest was read; ``threads`` compute threads for one pass.

    An encoder-decoder answers behind the ids that the paper's code gives its decoder.
    Errors: ModelError when onnxruntime cannot load the graph, or the graph, the tables and the
    manifest do not fit together.
    """
    start = time.perf_counter()
    graph = directory / (ENCODER if manifest.encoder_decoder else GRAPH)
    session = open_session(graph, threads)
    inputs = _inputs_of(graph, session, "inputs_embeds")
    answers = None
    if manifest.encoder_decoder:
        path = directory / DECODER
        answers = AnswerDecoder(
            open_session(path, threads), np.asarray(manifest.decoder_paper_ids, dtype=np.int64)
        )
        _inputs_of(path, answers.session, "inputs_embeds", "encoder_hidden_states")
    past = [name for name in inputs if name.startswith("past_key_values.")]
    tied = manifest.tied_embedding
    table, *mapped = _map_table(directory / HEAD)
    embedding = table
    if not tied:
        embedding, *more = _map_table(directory / EMBEDDING)
        mapped += more
    model = Model(
        manifest=manifest,
        session=session,
        embedding=embedding,
        head=table,
        head_bias=_map_table(directory / HEAD_BIAS)[0] if manifest.head_bias else None,
        mapped=tuple(mapped),
        input_names=tuple(inputs),
        past_inputs=tuple((name, (inputs[name].shape[1], inputs[name].shape[3])) for name in past),
        present_names=tuple(name.replace("past_key_values", "present") for name in past),
        load_s=time.perf_counter() - start,
        answers=answers,
    )
    _check_shapes(directory, model, graph.name, inputs["inputs_embeds"].shape[-1])
    if manifest.first_token_ids:
        model.first_tokens.update(_read_first_tokens(directory, model))
    return model


def _read_first_tokens(directory: Path, model: Model) -> dict[int, Past]:
    """The keys and values of the first tokens that were computed when the graph was rounded."""
    table, *_ = _map_table(directory / FIRST_PAST)
    ids, shapes = model.manifest.first_token_ids, [shape for _, shape in model.past_inputs]
    if table.shape != (len(ids), sum(heads * size for heads, size in shapes)):
        raise ModelError(
            f"{directory / FIRST_PAST} has shape {table.shape}, which does not fit the graph "
            f"and the {len(ids)} first tokens of {MANIFEST}: the files belong to different models."
        )
    ends = np.cumsum([heads * size for heads, size in shapes])[:-1]
    return {
        token_id: tuple(
            part.reshape(1, heads, 1, size)
            for part, (heads, size) in zip(np.split(row, ends), shapes, strict=True)
        )
        for token_id, row in zip(ids, table.astype(np.float32), strict=True)
    }


def _inputs_of(path: Path, session: Any, *needed: str) -> dict[str, Any]:
    """A graph's inputs by name. Errors: ModelError when its ends are not those of an export."""
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = [node.name for node in session.get_outputs()]
    if not inputs.keys() >= set(needed) or "last_hidden_state" not in outputs:
        raise ModelError(
            f"{path} does not go from {' and '.join(needed)} to last_hidden_state, so it was "
            "not written by `edge-eval export`: export the checkpoint again."
        )
    return inputs


def _check_shapes(directory: Path, model: Model, graph: str, graph_width: int) -> None:
    """Raise ModelError when graph, tables and manifest cannot be one model's."""
    manifest = model.manifest
    width, size = manifest.hidden_size, manifest.vocab_size
    if graph_width != width:
        raise ModelError(
            f"{directory / graph} takes rows of {graph_width} and the manifest says hidden size "
            f"{width}: the files belong to different models."
        )
    for file, array in ((HEAD, model.head), (EMBEDDING, model.embedding)):
        if array.ndim != 2 or array.shape[1] != width:
            raise ModelError(
                f"{directory / file} has shape {array.shape} and the manifest says hidden size "
                f"{width}: the files belong to different models."
            )
    if len(model.embedding) < size:
        name = HEAD if manifest.tied_embedding else EMBEDDING
        raise ModelError(
            f"{directory / name} has {len(model.embedding)} rows and the manifest says a "
            f"vocabulary of {size}: the files belong to different models."
        )
    if model.head_bias is not None and model.head_bias.shape != (len(model.head),):
        raise ModelError(
            f"{directory / HEAD_BIAS} has shape {model.head_bias.shape} and the head "
            f"{len(model.head)} rows: the files belong to different models."
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else repr(error)


def _map_table(path: Path) -> tuple[npt.NDArray[Any], mmap.mmap]:
    """A .npy table, memory-mapped without read-ahead: only the rows touched become resident."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"format version {version}")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if fortran or dtype not in (np.dtype("float32"), np.dtype("float16")):
            raise ValueError(f"{dtype} in {'Fortran' if fortran else 'C'} order")
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape}")
        if hasattr(mapped, "madvise"):  # not on Windows
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, dtype, math.prod(shape), offset).reshape(shape), mapped
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: export the model again.") from error
    except (ValueError, OverflowError) as error:
        raise ModelError(f"{path} is not a table of rows: {error}. Export again.") from error


@dataclass(frozen=True, slots=True)
class LetterReader:
    """Reads the letters' logits off a model: prepared once, used for every prompt.

    Where every letter is one token the values are bare logits. Where one is not, or
    ``normalized`` asks for it, they are log-probabilities over the vocabulary: log p(first) +
    log p(second | first) + ..., the prompt run once and continued from its keys and values.
    """

    model: LetterModel
    ids: tuple[tuple[int, ...], ...]  # per letter; empty for one that is not measured
    normalized: bool
    rows: Any  # the model's head_rows() of the first ids

    def read(self, input_ids: Int64Array, past: Past | None = None) -> LetterLogits:
        """The letters' values behind a prompt, and the time of its forward pass(es)."""
        start = time.perf_counter()
        values = np.full(len(self.ids), np.nan, dtype=np.float32)
        measured = [index for index, ids in enumerate(self.ids) if ids]
        if not self.normalized:
            hidden, _ = self.model.run(input_ids, past)
            values[measured] = self.model.logits(hidden, self.rows)
        else:
            several = any(len(ids) > 1 for ids in self.ids)
            hidden, present = self.model.run(input_ids, past, keep=several)
            self._walk(hidden, present, measured, 0, 0.0, values)
        return LetterLogits(values, time.perf_counter() - start)

    def _walk(
        self,
        hidden: Float32Array,
        past: Past,
        indices: list[int],
        depth: int,
        so_far: float,
        values: Float32Array,
    ) -> None:
        """Fill the values of the letters that share their first ``depth`` ids."""
        logits = self.model.all_logits(hidden).astype(np.float64)
        logits -= _log_sum_exp(logits)
        by_id: dict[int, list[int]] = {}
        for index in indices:
            by_id.setdefault(self.ids[index][depth], []).append(index)
        for token_id, sharing in by_id.items():
            total = so_far + float(logits[token_id])
            longer = [index for index in sharing if len(self.ids[index]) > depth + 1]
            for index in sharing:
                if index not in longer:
                    values[index] = total
            if longer:
                step = np.array([token_id], dtype=np.int64)
                hidden_next, past_next = self.model.run(step, past, keep=True)
                self._walk(hidden_next, past_next, longer, depth + 1, total, values)


@dataclass(frozen=True, slots=True)
class TextReader:
    """Lets a model write on behind a prompt, the likeliest token each time; used for every prompt."""

    model: LetterModel
    max_new_tokens: int
    stop_ids: frozenset[int]  # tokens that end a text
    decode: Callable[[Sequence[int]], str]

    def read(self, input_ids: Int64Array, past: Past | None = None) -> GeneratedText:
        """The text behind a prompt, and the time of its forward passes.

        It ends at a stop token, at ``max_new_tokens``, or where the model can take no more.
        """
        start = time.perf_counter()
        longest = self.model.manifest.max_length
        n_before = len(input_ids)
        if past:  # a folder that cannot be continued keeps ids (past,), not keys
            n_before += len(past[0]) if past[0].ndim == 1 else past[0].shape[-2]
        ids: list[int] = []
        while True:
            is_last = len(ids) + 1 == self.max_new_tokens or n_before + len(ids) >= longest
            hidden, past = self.model.run(input_ids, past, keep=not is_last)
            logits = self.model.all_logits(hidden)
            if not np.isfinite(logits).all():
                return GeneratedText(None, time.perf_counter() - start)
            token_id = int(np.argmax(logits))
            if token_id in self.stop_ids:
                break
            ids.append(token_id)
            if is_last:
                break
            input_ids = np.array([token_id], dtype=np.int64)
        latency_s = time.perf_counter() - start
        return GeneratedText(self.decode(ids), latency_s)


def _log_sum_exp(logits: npt.NDArray[np.float64]) -> float:
    largest = float(logits.max())
    return largest + math.log(float(np.exp(logits - largest).sum()))


def letter_reader(
    model: LetterModel, ids: tuple[tuple[int, ...], ...], *, normalized: bool = False
) -> LetterReader:
    """A reader of the letters with these token ids.

    Errors: ModelError when an id lies outside the head: the tokenizer is another model's.
    """
    largest = max((token_id for spelling in ids for token_id in spelling), default=0)
    if largest >= model.n_logits:
        raise ModelError(
            f"the tokenizer spells a letter with token {largest}, and the head has "
            f"{model.n_logits} rows: tokenizer and weights belong to different models."
        )
    normalized = normalized or any(len(spelling) > 1 for spelling in ids)
    rows = model.head_rows([spelling[0] for spelling in ids if spelling])
    return LetterReader(model, ids, normalized, rows)
