"""Letter logits -> a score per option, and the option chosen; SCORING_METHODS and PROTOCOLS below.

What reads an answer out of a generated text instead stands in TEXT_SCORING_METHODS.

Source of the default: mbzuai-nlp/ArabicMMLU, util_compute.py at 8d5b148: of the letters the
question has, the one with the largest next-token logit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_eval.errors import RecordError
from edge_eval.generated import read_answer
from edge_eval.schema import ExportManifest

Scores = npt.NDArray[np.float64]  # (options,), larger is better


@dataclass(frozen=True, slots=True)
class Decision:
    predicted: int | None  # None when a logit is not finite: never a prediction
    tied: bool


def decide(scores: Scores, *, partial: bool = False) -> Decision:
    """The option with the largest score; ties go to the first and are reported.

    partial: a score that is missing belongs to a letter below all that an endpoint told of, so that
    those decide; none at all is no prediction.
    """
    if partial and np.isfinite(scores).any():
        scores = np.where(np.isfinite(scores), scores, -np.finfo(np.float64).max)
    if not np.isfinite(scores).all():
        return Decision(None, tied=False)
    best = int(np.argmax(scores))
    return Decision(best, tied=int((scores == scores[best]).sum()) > 1)


def option_logits(
    letter_logits: Sequence[float | None], letters: Sequence[str], all_letters: Sequence[str]
) -> Scores:
    """The logits of the question's own letters, out of the row kept for all; NaN where none."""
    values = [letter_logits[all_letters.index(letter)] for letter in letters]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _argmax(logits: Scores, letters: Sequence[str]) -> Scores:  # noqa: ARG001 - one signature
    return logits


def _per_character(logits: Scores, letters: Sequence[str]) -> Scores:
    return logits / np.array([len(letter) for letter in letters], dtype=np.float64)


SCORING_METHODS: dict[str, Callable[[Scores, Sequence[str]], Scores]] = {
    "argmax": _argmax,
    # Source: lighteval's LogProbCharNorm; wants log-probabilities, not bare logits.
    "per-character": _per_character,
}

# Name -> the index of the option that a text answers with, given the question's letters.
TEXT_SCORING_METHODS: dict[str, Callable[[str, Sequence[str]], int | None]] = {
    "generated": read_answer,
}


@dataclass(frozen=True, slots=True)
class Protocol:
    """A published way to reach a score: its prompts, its scoring, its headline average."""

    about: str
    scoring: str
    headline: str  # "micro" or "macro"
    prompt: str | None = None  # None: the user's choice among the paper's
    letters: str | None = None
    normalized: bool = False  # log-probabilities over the whole vocabulary are needed
    decoder_input: str = "start"  # or "paper": what an encoder-decoder's decoder is given first


# Their numbers must never be mixed: one model differs by up to 10 points between them.
PROTOCOLS: dict[str, Protocol] = {
    "paper": Protocol(
        "the ArabicMMLU authors' prompts and rule", "argmax", "micro", decoder_input="paper"
    ),
    "lm-eval": Protocol(
        "lm-evaluation-harness's arabicmmlu: no last space, ' A' scored",
        "argmax",
        "micro",
        prompt="en",
        letters="latin",
    ),
    "oall": Protocol(
        "Open Arabic LLM Leaderboard: no metadata line, no context",
        "per-character",
        "macro",
        prompt="ar",
        letters="arabic",
        normalized=True,
    ),
}


def decoder_input_ids(manifest: ExportManifest, template: str) -> tuple[int, ...]:
    """What an encoder-decoder's decoder is given before the letter; empty for a decoder.

    The paper's code gives it tokenizer("<pad>"). T5's tokenizers end every text with </s>, so the
    letter is read behind <pad> </s>, not behind <pad>, where a trained model begins its answer and
    where lm-evaluation-harness reads it. template: a name in PROMPT_TEMPLATES.
    Source: mbzuai-nlp/ArabicMMLU, util_compute.py, predict_classification_mt0_by_letter.
    """
    protocol = PROTOCOLS.get(template, PROTOCOLS["paper"])
    papers = protocol.decoder_input == "paper"
    return manifest.decoder_paper_ids if papers else manifest.decoder_start_ids


def protocol_named(name: str) -> Protocol:
    """The protocol that a run record names. Errors: RecordError for one that is not known here."""
    if name not in PROTOCOLS:
        raise RecordError(
            f"the run's protocol {name[:40]!r} is not known here, only {', '.join(PROTOCOLS)}: "
            "update edge-eval."
        )
    return PROTOCOLS[name]
