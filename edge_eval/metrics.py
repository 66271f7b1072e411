"""Predictions -> numbers; a new way to slice the questions is one entry in SLICES, at the end.

Statistics are float64. Nothing is ever 0/0: what the predictions cannot tell is None. Only SCORED
predictions count towards a share; the others are counted beside it.
"""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edge_eval.errors import RecordError
from edge_eval.letters import OPTION_LETTERS
from edge_eval.schema import Int64Array, Prediction, Status

Float64Array: TypeAlias = npt.NDArray[np.float64]

# The most that can meaningfully be reached: the share of keys found right in a check of 100 rows.
# Source: Koto et al. 2024, arXiv:2402.12840, on the quality of the data.
ACCURACY_CEILING = 0.96

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)

# Fewer samples say nothing of so rare a latency. Source: MLPerf Inference rules, single-stream
# scenario: queries needed for the early-stopping estimate of the percentile.
P90_MIN_SAMPLES = 64
P99_MIN_SAMPLES = 662
DRIFT_MIN_SAMPLES = 200  # so that a tenth holds 20
FIT_MIN_LENGTHS = 3  # through two lengths every line is exact

N_CALIBRATION_BINS = 10


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of right answers and what it takes to judge it; all but the counts None if n is 0."""

    n_scored: int
    n_correct: int
    value: float | None
    standard_error: float | None  # sqrt(p (1 - p) / (n - 1)); None for a single question
    ci_low: float | None  # 95 %, Wilson
    ci_high: float | None
    chance: float | None  # what guessing would reach: mean of 1 / number of options
    always_a: float | None  # what answering the first option would reach
    majority: float | None  # what answering the most common answer would reach
    n_invalid: int
    n_too_long: int
    n_tied: int
    value_of_all: float | None  # with unscored counted as wrong; None when all were scored
    n_unseen: int = 0


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of n with its 95 % interval; all but n None if n is 0."""

    n: int
    value: float | None
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True, slots=True)
class ReadAnswers:
    """What an accuracy of generated answers is made of: those read, and random options."""

    fallbacks: Proportion  # of the scored questions, those answered by a random option (Wilson)
    matched: Proportion  # right among those whose text was read (Wilson)
    expected: Proportion  # right if each random option counts 1 / number of options (normal)


@dataclass(frozen=True, slots=True)
class MacroAccuracy:
    """The mean of the tasks' accuracies, each task weighing the same."""

    n_tasks: int  # with a scored question: the ones averaged
    value: float | None
    standard_error: float | None  # of this mean, not the pooled one; see macro_accuracy
    ci_low: float | None  # 95 %, normal, within 0-1; None where the standard error is 0 or None
    ci_high: float | None
    n_single_tasks: int  # with one scored question, whose variance is borrowed from the others
    n_unscored_tasks: int  # without a scored question, left out


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """Latency as a straight line in the prompt's tokens, by least squares."""

    fixed_ms: float
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of single forward passes; None where the samples are too few to say."""

    n: int
    p50_ms: float | None
    p90_ms: float | None  # from P90_MIN_SAMPLES on
    p99_ms: float | None  # from P99_MIN_SAMPLES on: below, the maximum is what there is to say
    max_ms: float | None
    mean_ms: float | None
    mean_tokens: float | None
    tokens_per_s: float | None  # all prompt tokens over all time
    fit: LatencyFit | None  # from FIT_MIN_LENGTHS distinct lengths on
    drift: float | None  # last tenth over first at equal length: 1.1 is 10 % slower


@dataclass(frozen=True, slots=True)
class LetterShare:
    """How often an option was chosen and how often it was right, over all scored questions."""

    option: int
    n_offered: int
    n_chosen: int
    n_answer: int
    chosen: float  # these two sum to 1 over the options
    right: float


def micro_accuracy(predictions: Sequence[Prediction]) -> Accuracy:
    """Accuracy over all scored questions, each weighing the same: the paper's "Average"."""
    scored = _scored(predictions)
    status = Counter(p.status for p in predictions)
    n, n_correct = len(scored), sum(p.correct for p in scored)
    value, ci_low, ci_high = (n_correct / n, *_wilson(n_correct, n)) if n else (None, None, None)
    answers = Counter(p.answer for p in scored)
    return Accuracy(
        n_scored=n,
        n_correct=n_correct,
        value=value,
        standard_error=math.sqrt(n_correct * (n - n_correct) / (n - 1)) / n if n > 1 else None,
        ci_low=ci_low,
        ci_high=ci_high,
        chance=math.fsum(1 / len(p.letters) for p in scored) / n if n else None,
        always_a=answers[0] / n if n else None,
        majority=max(answers.values()) / n if n else None,
        n_invalid=status[Status.INVALID],
        n_too_long=status[Status.TOO_LONG],
        n_tied=sum(p.tied for p in scored),
        value_of_all=n_correct / len(predictions) if 0 < n < len(predictions) else None,
        n_unseen=status[Status.UNSEEN],
    )


def read_answers(predictions: Sequence[Prediction]) -> ReadAnswers | None:
    """What generated answers were read and what chance added; None where none were generated."""
    scored = [p for p in _scored(predictions) if p.matched is not None]
    if not scored:
        return None
    matched = [p for p in scored if p.matched]
    credit = np.array([float(p.correct) if p.matched else 1 / len(p.letters) for p in scored])
    value, n = float(credit.mean()), len(scored)
    # Without the draw's own noise: what is left is that of the questions.
    error = float(credit.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return ReadAnswers(
        fallbacks=_proportion(n - len(matched), n),
        matched=_proportion(sum(p.correct for p in matched), len(matched)),
        expected=Proportion(
            n,
            value,
            max(0.0, value - Z * error) if error else None,
            min(1.0, value + Z * error) if error else None,
        ),
    )


def _proportion(count: int, n: int) -> Proportion:
    return Proportion(n, count / n, *_wilson(count, n)) if n else Proportion(0, None, None, None)


def macro_accuracy(predictions: Sequence[Prediction]) -> MacroAccuracy:
    """Mean over tasks, with the standard error of that mean: sqrt(sum of task variances) / T.

    A task's variance is that of its share, p (1 - p) / (n - 1). A task of one question has none of
    its own and borrows the variance pooled within the others; where that is unknown or 0 (all tasks
    single, or each all right or all wrong) every task takes the variance over all questions.
    So a mean strictly between 0 and 1 never gets 0.
    """
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for p in _scored(predictions):
        outcomes[p.task].append(p.correct)
    n_unscored_tasks = len({p.task for p in predictions} - set(outcomes))
    if not outcomes:
        return MacroAccuracy(0, None, None, None, None, 0, n_unscored_tasks)
    tasks = [outcomes[task] for task in sorted(outcomes)]  # sorted: sums do not depend on order
    n = np.array([len(task) for task in tasks], dtype=np.float64)
    n_correct = np.array([sum(task) for task in tasks], dtype=np.float64)
    value = math.fsum(n_correct / n) / len(tasks)
    variances = _task_variances(n, n_correct)
    error = None if variances is None else math.sqrt(math.fsum(variances)) / len(tasks)
    return MacroAccuracy(
        n_tasks=len(tasks),
        value=value,
        standard_error=error,
        # An interval without width would claim certainty.
        ci_low=max(0.0, value - Z * error) if error else None,
        ci_high=min(1.0, value + Z * error) if error else None,
        n_single_tasks=int((n == 1).sum()),
        n_unscored_tasks=n_unscored_tasks,
    )


def _task_variances(n: Float64Array, n_correct: Float64Array) -> Float64Array | None:
    """Variance of each task's share (tasks,), or None for one question in all."""
    squares = n_correct * (n - n_correct) / n  # squared deviations within each task
    freedom = (n - 1).sum()
    pooled = squares.sum() / freedom if freedom else 0.0
    if pooled > 0:
        return np.where(n > 1, squares / np.maximum(n - 1, 1), pooled) / n
    total, right = float(n.sum()), float(n_correct.sum())
    return right * (total - right) / total / (total - 1) / n if total > 1 else None


def by(predictions: Sequence[Prediction], slice_name: str) -> dict[str, Accuracy]:
    """Accuracy of each part of the questions; slice_name is a key of SLICES.

    Parts come in the paper's order, or the natural one, and by name where there is none.
    """
    parts: dict[str, list[Prediction]] = defaultdict(list)
    for p, label in zip(predictions, SLICES[slice_name](predictions), strict=True):
        parts[label].append(p)
    order = {label: rank for rank, label in enumerate(LABEL_ORDER)}
    ranked = sorted(parts, key=lambda label: (order.get(label, len(order)), label == NONE, label))
    return {label: micro_accuracy(parts[label]) for label in ranked}


def latency(predictions: Sequence[Prediction]) -> Latency:
    """Latency of all predictions that were timed, in the order answered."""
    timed = [(p.n_tokens, p.latency_s) for p in predictions if p.latency_s is not None]
    return latency_of([n for n, _ in timed], [s for _, s in timed])


def latency_of(n_tokens: Sequence[int], latency_s: Sequence[float]) -> Latency:
    """Latency from the tokens and times of passes, in the order they were run."""
    tokens = np.asarray(n_tokens, dtype=np.float64)
    ms = np.asarray(latency_s, dtype=np.float64) * 1e3
    n, total_s = len(ms), float(ms.sum()) / 1e3
    if not n:
        return Latency(0, None, None, None, None, None, None, None, None, None)
    slope = _slope(tokens, ms)
    line = LatencyFit(float(ms.mean() - slope * tokens.mean()), slope)
    return Latency(
        n=n,
        p50_ms=float(np.median(ms)),
        p90_ms=float(np.percentile(ms, 90)) if n >= P90_MIN_SAMPLES else None,
        p99_ms=float(np.percentile(ms, 99)) if n >= P99_MIN_SAMPLES else None,
        max_ms=float(ms.max()),
        mean_ms=float(ms.mean()),
        mean_tokens=float(tokens.mean()),
        tokens_per_s=float(tokens.sum()) / total_s if total_s > 0 else None,
        fit=line if len(np.unique(tokens)) >= FIT_MIN_LENGTHS else None,
        drift=_drift(ms, line.fixed_ms + line.ms_per_token * tokens),
    )


def _slope(tokens: Float64Array, ms: Float64Array) -> float:
    """Least-squares ms per token; 0 where all lengths are one."""
    centred = tokens - tokens.mean()
    spread = float(centred @ centred)
    return float(centred @ ms) / spread if spread > 0 else 0.0


def _drift(ms: Float64Array, expected_ms: Float64Array) -> float | None:
    """How much slower than expected the last tenth ran, over the same of the first tenth."""
    if len(ms) < DRIFT_MIN_SAMPLES or expected_ms.min() <= 0:
        return None
    ratio, tenth = ms / expected_ms, len(ms) // 10
    first, last = float(np.median(ratio[:tenth])), float(np.median(ratio[-tenth:]))
    return last / first if first > 0 else None


def letter_shares(predictions: Sequence[Prediction]) -> tuple[LetterShare, ...]:
    """One entry per option index that any scored question offers; empty when none is scored."""
    scored = _scored(predictions)
    chosen, right = Counter(p.predicted for p in scored), Counter(p.answer for p in scored)
    return tuple(
        LetterShare(
            option=option,
            n_offered=sum(len(p.letters) > option for p in scored),
            n_chosen=chosen[option],
            n_answer=right[option],
            chosen=chosen[option] / len(scored),
            right=right[option] / len(scored),
        )
        for option in range(max((len(p.letters) for p in scored), default=0))
    )


def letter_probabilities(prediction: Prediction) -> Float64Array:
    """Softmax over the logits of the letters present (n_options,): the paper's confidence.

    Errors: RecordError for a prediction whose letters have no finite logits, so one never scored.
    """
    # A question's letters are the first ones of an alphabet, so the first names their columns.
    start = OPTION_LETTERS.index(prediction.letters[0])
    values = prediction.letter_logits[start : start + len(prediction.letters)]
    logits = np.array([v for v in values if v is not None], dtype=np.float64)
    if len(logits) < len(values):
        raise RecordError(
            f"question {prediction.question_id[:40]!r} has letters without a logit: the run record "
            "is damaged."
        )
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def has_probabilities(prediction: Prediction) -> bool:
    """Whether all of a question's letters have a logit: not in generated texts or an endpoint's top."""
    start = OPTION_LETTERS.index(prediction.letters[0])
    return None not in prediction.letter_logits[start : start + len(prediction.letters)]


def expected_calibration_error(predictions: Sequence[Prediction]) -> float | None:
    """Mean gap between confidence in the chosen option and accuracy, over 10 equal-width bins.

    0 is calibrated, 1 the worst; None when nothing is scored, or a letter of it has no logit. A bin
    holds its upper edge.
    """
    scored = _scored(predictions)
    if not scored or not all(map(has_probabilities, scored)):
        return None
    confidence = np.array([letter_probabilities(p)[p.predicted] for p in scored])
    correct = np.array([p.correct for p in scored], dtype=np.float64)
    bins = np.clip(np.ceil(confidence * N_CALIBRATION_BINS).astype(np.int64) - 1, 0, None)
    gaps = np.bincount(bins, weights=confidence - correct)
    return float(np.abs(gaps).sum()) / len(scored)


def brier_score(predictions: Sequence[Prediction]) -> float | None:
    """Mean squared distance of the probabilities from the answer, summed over the options present.

    0 is perfect, 2 the worst, 1 - 1/k an even guess among k; None when nothing is scored, or a
    letter of it has no logit.
    """
    scored = _scored(predictions)
    if not scored or not all(map(has_probabilities, scored)):
        return None
    distances = []
    for p in scored:
        probabilities = letter_probabilities(p)
        truth = np.arange(len(probabilities)) == p.answer
        distances.append(float(((probabilities - truth) ** 2).sum()))
    return math.fsum(distances) / len(distances)


def _scored(predictions: Sequence[Prediction]) -> list[Prediction]:
    return [p for p in predictions if p.status is Status.SCORED]


def _wilson(n_correct: int, n: int) -> tuple[float, float]:
    from scipy.stats import binomtest  # slow to import, and most commands do without

    interval = binomtest(n_correct, n).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


# Direction marks, zero-width characters, tatweel, and diacritics in their isolated forms, which
# NFKC would turn into a space and a diacritic: a word cut in two.
_INVISIBLE = re.compile(
    "[\u0640\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufc5e-\ufc63\ufe70-\ufe7f\ufeff]"
)
_DIACRITICS = re.compile("[\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06ed]")
_LAYSA = "ليس(?:ت|ا|تا|وا)?"
# Left out, since the same letters are commonly another word: ما (what), وعدا (a promise), ألم
# (pain), أولا (first), الغير (others), دون (below).
_NEGATION = re.compile(
    rf"""(?<!\w)(?:
        [وف]? (?: لا | لم | لن | {_LAYSA} )                          # no, did not, will not, is not
      | أ (?: ف?لا | {_LAYSA} | [وف] (?: لم | لن | {_LAYSA} ) )      # is it not, have they not
      | [وف]? (?: إلا | الا | سوى | غير | باستثناء | (?:في)?ماعدا )  # except, other than
      | عدا                                                          # except: also in ما عدا
    )(?!\w)""",
    re.VERBOSE,
)


def is_negated(text: str) -> bool:
    """Whether a question holds a word that negates or excepts, such as ليس, لا, لم, غير or ما عدا.

    Words are matched whole, after NFKC and without diacritics and tatweel, with و, ف or the asking
    أ attached or not. Words are spotted, nothing is parsed, as for the paper's slice of this name;
    the list, _NEGATION, is ours.
    """
    plain = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text))
    plain = _DIACRITICS.sub("", plain).replace("\u06cc", "\u064a")  # Farsi yeh, seen in the data
    return _NEGATION.search(plain) is not None


Labels: TypeAlias = Callable[[Sequence[Prediction]], Sequence[str]]


def _each(label: Callable[[Prediction], str]) -> Labels:
    return lambda predictions: [label(p) for p in predictions]


def _length_terciles(predictions: Sequence[Prediction]) -> list[str]:
    """Each question's third by characters, among these questions; equal lengths stay together."""
    if not predictions:
        return []
    lengths: Int64Array = np.array([p.n_characters for p in predictions], dtype=np.int64)
    thirds = np.searchsorted(np.quantile(lengths, [1 / 3, 2 / 3]), lengths, side="left")
    return [("short", "medium", "long")[third] for third in thirds]


def slice_label(slice_name: str, part: str) -> str:
    """A part's name where its slice's is not beside it."""
    words = {"n_options": f"{part} options", "length": f"{part} questions"}
    return words.get(slice_name, part)


NONE = "none"  # the label of an empty column

# Groups in the order of the paper's Table 4, then what has an order of its own.
LABEL_ORDER = (
    *("STEM", "Social Science", "Humanities", "Language", "Other"),
    *("Primary", "Middle", "High", "Univ", "Prof"),
    *("short", "medium", "long"),
)

# Name -> the label of each prediction, given all of them, since a tercile needs the others.
SLICES: dict[str, Labels] = {
    "group": _each(lambda p: p.group or NONE),
    "subject": _each(lambda p: p.subject or NONE),
    "level": _each(lambda p: p.level or NONE),
    "task": _each(lambda p: p.task or NONE),
    "country": _each(lambda p: p.country or NONE),
    "n_options": _each(lambda p: str(len(p.letters))),
    "context": _each(lambda p: "with context" if p.has_context else "without context"),
    "negation": _each(lambda p: "negated" if p.negated else "not negated"),
    "length": _length_terciles,
}

# The slices by what a question is like rather than where it comes from.
QUESTION_SLICES = ("n_options", "context", "negation", "length")
