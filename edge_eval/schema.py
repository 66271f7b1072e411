"""The data of an evaluation, in the order it flows; read top to bottom, this is the design.

    Question -> Prompt -> EncodedPrompt -> LetterLogits -> Prediction -> RunRecord -> Comparison

Observations are saved, statistics derived: a Prediction keeps the ten logits, the token count and
the time of its forward pass, and every figure in a table is computed when it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Question:
    """One row of ArabicMMLU. All text is kept as it stands in the data, unstripped."""

    id: str
    group: str
    subject: str
    level: str
    country: str
    context: str
    text: str
    options: tuple[str, ...]
    answer: int
    split: str  # "test", or "dev" for a few-shot row

    @property
    def task(self) -> str:
        """The task's name on the Hub, subject and level: ``Biology (High School)``."""
        return task_name(self.subject, self.level)


# The level's wording in the names of the Hub's 40 configs. Source: MBZUAI/ArabicMMLU's card.
LEVEL_TITLES = {
    "": "",
    "Primary": "Primary School",
    "Middle": "Middle School",
    "High": "High School",
    "Univ": "University",
    "Prof": "Professional",
}


def task_name(subject: str, level: str) -> str:
    """Subject and level as the Hub names the task."""
    return f"{subject} ({LEVEL_TITLES[level]})" if level else subject


@dataclass(frozen=True, slots=True)
class DataFingerprint:
    """Which questions a run was about."""

    source: str
    kind: str  # "hub", "file" or "sample"
    revision: str | None  # of the Hub
    sha256: str  # over the selected questions' fields: the same rows agree whatever file held them
    n_rows: int  # read
    n_refused: int
    n_selected: int  # test questions left by the filters and the limit


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that cannot be a question: where it stands and why."""

    line: int  # of the file, the header being line 1; of the table for parquet and the Hub
    reason: str


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions to ask, in the data's order, and the few-shot rows of each task."""

    test: tuple[Question, ...]
    shots: Mapping[str, tuple[Question, ...]]  # task -> its few-shot rows in file order
    refused: tuple[RefusedRow, ...]
    fingerprint: DataFingerprint


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text a model is asked to continue, and what its next token may be."""

    question_id: str
    text: str
    letters: tuple[str, ...]  # one per option of the question
    n_shots: int = 0
    rotation: int = 0  # by how many places the options were moved up


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    question_id: str
    input_ids: Int64Array  # (seq,)


@dataclass(frozen=True, slots=True)
class LetterLogits:
    """What one forward pass said of the ten option letters, in the order of OPTION_LETTERS."""

    values: Float32Array  # (10,)
    latency_s: float
    n_tokens: int | None = None  # of the prompt, where an endpoint counted them


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """What a model wrote behind a prompt, greedily."""

    text: str | None  # None where the logits were not finite
    latency_s: float  # of the prompt and all its new tokens
    n_tokens: int | None = None  # of the prompt, where an endpoint counted them


Answer: TypeAlias = LetterLogits | GeneratedText


class Status(StrEnum):
    """What became of a question."""

    SCORED = "scored"
    INVALID = "invalid"  # a logit was not finite: never a prediction
    TOO_LONG = "too_long"  # more tokens than the model can take: never cut
    UNSEEN = "unseen"  # none of its letters was among the tokens that an endpoint told of


@dataclass(frozen=True, slots=True)
class Prediction:
    """A question's outcome with all that is needed to decide it again without the model."""

    question_id: str
    group: str
    subject: str
    level: str
    country: str
    has_context: bool
    negated: bool  # the question asks what is not so: metrics.is_negated
    n_characters: int  # of the question and its context
    letters: tuple[str, ...]
    answer: int
    predicted: int | None  # None unless status is SCORED
    tied: bool
    letter_logits: tuple[float | None, ...]  # (10,); None where not finite or not computed
    n_tokens: int  # 0 where unknown
    latency_s: float | None
    status: Status
    n_shots: int = 0
    rotation: int = 0  # 0 unless the run asked every question with its options rotated
    index: int = 0  # of the prompt, in the data's order
    generated: str | None = None  # the beginning of the text that was read for an answer
    matched: bool | None = None  # False: no answer could be read, ``predicted`` is a random option

    @property
    def task(self) -> str:
        return task_name(self.subject, self.level)

    @property
    def correct(self) -> bool:
        return self.status is Status.SCORED and self.predicted == self.answer


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Every setting of a run; the only place for defaults.

    The first block decides the score and must agree between runs that are compared; the
    second decides time and memory only.
    """

    model: str = ""
    file: str = ""  # which graph of an ONNX folder taken as it is; empty: found by name
    data: str = "sample"
    protocol: str = "paper"  # a name in PROTOCOLS
    prompt: str = "en"
    letters: str = "latin"
    scoring: str = "argmax"  # a name in SCORING_METHODS or TEXT_SCORING_METHODS
    max_new_tokens: int = 1  # of a text that is read for an answer
    endpoint: str = ""  # URL of a server that answers instead of a model directory
    top_logprobs: int = 20  # tokens an endpoint is asked to tell of, where letters are scored
    shots: int = 0
    allow_fewer_shots: bool = False
    chat_template: str = "off"  # "off", "auto" (the model's), a file's name, "server" (endpoint's)
    system_prompt: str = ""  # only with a chat template
    permute: bool = False  # every question asked with its options rotated
    tasks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    countries: tuple[str, ...] = ()
    limit: int | None = None
    seed: int = 0  # of the limit's sample, and of random options

    scenario: str = "single-stream"  # or "offline"; "endpoint" for one, measured at the client
    reuse: str = "none"  # or "shared": prefixes computed once
    threads: int | None = None
    warmup: int = 3
    concurrency: int = 1  # requests to an endpoint at once
    timeout_s: float = 120.0  # for an endpoint's answer to one request

    @property
    def template(self) -> str:
        """The prompt template's name in PROMPT_TEMPLATES."""
        return f"{self.prompt}-{self.letters}" if self.protocol == "paper" else self.protocol


@dataclass(frozen=True, slots=True)
class ExportManifest:
    """What a model directory holds, where it came from and how well it agrees with its source."""

    schema_version: int
    name: str
    source: str
    revision: str | None
    architecture: str
    precision: str
    # "fused" or "plain" (exporters/onnx_graph.py), "cut" (exporters/cut_graph.py), or the file's
    # name in an ONNX folder taken as it is.
    graph: str
    n_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int  # tokens
    sliding_window: int | None  # tokens
    tied_embedding: bool
    embedding_scale: float
    head_bias: bool
    head_scale: float
    head_softcap: float | None
    files: Mapping[str, Mapping[str, Any]]  # name -> {sha256, size_bytes}
    tools: Mapping[str, str]
    parity: Mapping[str, Any]
    created: str
    # The first token's activations dwarf the others' and would set their resolution.
    first_token_apart: bool = False
    # The first tokens whose keys and values were computed in fp32 and lie beside the graph.
    first_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = None  # what exporters/quantize.py measured
    kind: str = "decoder"  # or "encoder-decoder"
    # What an encoder-decoder's decoder is given before its answer: the start token, as it was
    # trained, and what the paper's code gives it, tokenizer("<pad>"); empty for a decoder.
    decoder_start_ids: tuple[int, ...] = ()
    decoder_paper_ids: tuple[int, ...] = ()
    # Tokens, where the checkpoint states a length that it was trained at and that bounds nothing.
    trained_length: int | None = None
    tokenizer: Mapping[str, Any] | None = None  # what exporters/checkpoint_tokenizer.py compared

    @property
    def encoder_decoder(self) -> bool:
        """Whether the prompt is read by an encoder and the answer begins in a decoder."""
        return self.kind == "encoder-decoder"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A whole run: its header and its predictions, in the order answered."""

    config: RunConfig
    manifest: ExportManifest
    data: DataFingerprint
    scoring: Mapping[str, Any]  # the ten letters measured, their token ids, normalized or not
    environment: Mapping[str, Any]
    observed: Mapping[str, Any]  # load time, peak memory, sizes: measured once a run
    predictions: tuple[Prediction, ...]
    complete: bool
    created: str
    path: str = ""
