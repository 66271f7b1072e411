"""Run records of the same questions -> Comparisons, or why not; what must agree: likeness.py.

The runs answered the same questions, so everything is paired by question: McNemar's exact test
says whether a difference is real, the bootstrap over questions how large it may be. Where several
tests stand side by side (groups, tasks, more than two runs) p is corrected by Holm's method.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_eval.errors import RecordError
from edge_eval.likeness import Unlike, find_unlike, name_runs, other_machine
from edge_eval.metrics import (
    CONFIDENCE,
    QUESTION_SLICES,
    SLICES,
    Float64Array,
    by,
    has_probabilities,
    letter_probabilities,
    micro_accuracy,
)
from edge_eval.schema import Prediction, RunRecord, Status

N_RESAMPLES = 10_000
ALPHA = 1 - CONFIDENCE  # a difference is called real when its corrected p is below

Row: TypeAlias = tuple[Prediction, ...]  # one question's prediction in each run
Right: TypeAlias = npt.NDArray[np.bool_]  # (questions,)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Candidate minus baseline over the questions that both scored; shares are 0-1."""

    n: int
    baseline: float
    candidate: float
    difference: float
    ci_low: float | None  # 95 %, bootstrap; None where every resample is the same
    ci_high: float | None
    n_gained: int
    n_lost: int
    p: float  # McNemar's exact test
    p_holm: float  # corrected for the tests beside it: groups, tasks or pairs of runs


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate over baseline: below 1 the candidate needs less. Without a value, the reason."""

    value: float | None
    ci_low: float | None = None  # 95 %, bootstrap over questions
    ci_high: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate against a baseline on the questions they share."""

    baseline: str
    candidate: str
    unlike: tuple[Unlike, ...]  # empty unless forced
    n_baseline: int
    n_candidate: int
    n_common: int
    n_unscored: int  # of the common questions, those that a run could not score: left out
    micro: PairedDifference
    # Mean over tasks; resampled within them, so too narrow where tasks have a few questions each.
    macro_difference: float
    macro_ci_low: float | None
    macro_ci_high: float | None
    groups: Mapping[str, PairedDifference]
    tasks: Mapping[str, PairedDifference]
    slices: Mapping[str, Mapping[str, PairedDifference]]  # by QUESTION_SLICES
    gained: tuple[str, ...]  # question ids: wrong in the baseline, right in the candidate
    lost: tuple[str, ...]
    n_changed: int  # questions with another option chosen
    agreement: float
    # KL(baseline || candidate) of the letters' probabilities, in nats; None where a run has none.
    mean_kl: float | None
    mean_total_variation: float | None
    latency: Ratio  # geometric mean of the questions' ratios
    memory: Ratio
    size: Ratio


@dataclass(frozen=True, slots=True)
class Place:
    """A run's place among those compared, on the questions that all of them scored."""

    run: str
    path: str
    accuracy: float
    ci_low: float | None  # 95 %, Wilson: of this run alone, not for telling two apart
    ci_high: float | None
    alike: tuple[int, ...]  # runs that share a number cannot be told apart


@dataclass(frozen=True, slots=True)
class Ranking:
    """All the runs by accuracy, and each candidate's Comparison with the baseline."""

    places: tuple[Place, ...]
    comparisons: tuple[Comparison, ...]


class Bootstrap:
    """Resamples questions, from a seed."""

    def __init__(self, seed: int, n_resamples: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._n_resamples = n_resamples

    def differences(self, n: int, n_gained: int, n_lost: int) -> Float64Array:
        """The paired difference in accuracy of every resample (n_resamples,)."""
        # Resampling n questions is drawing how often +1, -1 and 0 come up: the same distribution
        # as by drawing indices, and quick at any number of questions.
        shares = [n_gained / n, n_lost / n, 1 - (n_gained + n_lost) / n]
        draws = self._rng.multinomial(n, shares, size=self._n_resamples)
        return np.asarray((draws[:, 0] - draws[:, 1]) / n, dtype=np.float64)

    def mean(self, values: Float64Array) -> tuple[float | None, float | None]:
        """The 95 % interval of a mean; nothing for a single value."""
        from scipy.stats import bootstrap

        if len(values) < 2:
            return None, None
        interval = bootstrap(
            (values,),
            np.mean,
            n_resamples=self._n_resamples,
            batch=max(1, (1 << 22) // len(values)),
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=self._rng,
        ).confidence_interval
        return float(interval.low), float(interval.high)


def compare(
    baseline: RunRecord,
    candidates: Sequence[RunRecord],
    *,
    force: bool = False,
    seed: int = 0,
    n_resamples: int = N_RESAMPLES,
) -> Ranking:
    """Compare each candidate with the baseline, and all of them with each other.

    force: compare the common questions of runs that are not like for like; the result says so.
    Errors: RecordError for unlike or incomplete runs, for runs without a common question that all
    scored, and for an id that names different questions.
    """
    records = (baseline, *candidates)
    rows = _join(records)
    unlike = [find_unlike(baseline, candidate) for candidate in candidates]
    for candidate, found in zip(candidates, unlike, strict=True):
        if found and not force:
            raise RecordError(_refusal(baseline, candidate, found))
    scored = [row for row in rows if all(p.status is Status.SCORED for p in row)]
    if not scored:
        raise RecordError(f"of {len(rows):,} common questions none was scored in every run.")
    names, boot = name_runs(records), Bootstrap(seed, n_resamples)
    pairs = list(combinations(range(len(records)), 2))
    tests = _correct([_test([(row[i], row[j]) for row in scored], boot)[0] for i, j in pairs])
    tested = dict(zip(pairs, tests, strict=True))
    comparisons = [
        Comparison(
            baseline=names[0],
            candidate=names[k],
            unlike=unlike[k - 1],
            n_baseline=len(baseline.predictions),
            n_candidate=len(records[k].predictions),
            n_common=len(rows),
            n_unscored=len(rows) - len(scored),
            micro=tested[0, k],
            latency=_latency_ratio(baseline, records[k], rows, k, boot),
            memory=_memory_ratio(baseline, records[k]),
            size=_observed_ratio(baseline, records[k], "disk_bytes"),
            **_answers([(row[0], row[k]) for row in scored], boot),
        )
        for k in range(1, len(records))
    ]
    return Ranking(_rank(records, names, scored, tested), tuple(comparisons))


def _join(records: Sequence[RunRecord]) -> list[Row]:
    """The questions that all runs asked, in the first one's order."""
    # A rotated asking is the same question again, not one more.
    runs = [{p.question_id: p for p in r.predictions if p.rotation == 0} for r in records]
    rows = [tuple(run[i] for run in runs) for i in runs[0] if all(i in run for run in runs)]
    if not rows:
        raise RecordError("the runs have no question in common: nothing can be compared.")
    for row in rows:
        if len({(p.task, p.answer, len(p.letters), p.n_characters) for p in row}) > 1:
            raise RecordError(
                f"question {row[0].question_id} is another question in each run: they are about "
                "different data and cannot be paired."
            )
    return rows


def _refusal(baseline: RunRecord, candidate: RunRecord, unlike: Sequence[Unlike]) -> str:
    n_common = len(_join((baseline, candidate)))
    return (
        f"{candidate.path or candidate.manifest.name} is not like "
        f"{baseline.path or baseline.manifest.name}: {'; '.join(map(str, unlike))} (baseline / "
        f"candidate); {n_common:,} questions are in both. Run one again as the other was run, or "
        "compare the common questions with --force."
    )


def _test(pairs: Sequence[Row], boot: Bootstrap) -> tuple[PairedDifference, Float64Array]:
    """The difference with its test, and its resamples (n_resamples,)."""
    from scipy.stats import binomtest

    n = len(pairs)
    gained = sum(b.correct and not a.correct for a, b in pairs)
    lost = sum(a.correct and not b.correct for a, b in pairs)
    resampled = boot.differences(n, gained, lost)
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    shares = sum(a.correct for a, _ in pairs) / n, sum(b.correct for _, b in pairs) / n
    return (
        PairedDifference(n, *shares, (gained - lost) / n, *_ends(resampled), gained, lost, p, p),
        resampled,
    )


def _ends(resampled: Float64Array) -> tuple[float | None, float | None]:
    low, high = (float(v) for v in np.quantile(resampled, [ALPHA / 2, 1 - ALPHA / 2]))
    return (low, high) if low < high else (None, None)  # without width it would claim certainty


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected by Holm's method for standing side by side, in the order given."""
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def _correct(tests: Sequence[PairedDifference]) -> list[PairedDifference]:
    corrected = holm([test.p for test in tests])
    return [dataclasses.replace(t, p_holm=p) for t, p in zip(tests, corrected, strict=True)]


def _answers(pairs: Sequence[Row], boot: Bootstrap) -> dict[str, Any]:
    """What the two runs answered: Comparison's fields from ``macro_difference`` on."""
    groups, _ = _by(pairs, "group", boot)
    tasks, resampled = _by(pairs, "task", boot)
    macro_low, macro_high = _ends(np.mean(resampled, axis=0))
    n_changed = sum(a.predicted != b.predicted for a, b in pairs)
    known = all(has_probabilities(p) for pair in pairs for p in pair)
    probabilities = [
        (letter_probabilities(a), letter_probabilities(b)) for a, b in (pairs if known else ())
    ]
    return {
        "macro_difference": float(np.mean([task.difference for task in tasks.values()])),
        "macro_ci_low": macro_low,
        "macro_ci_high": macro_high,
        "groups": groups,
        "tasks": tasks,
        "slices": {name: _by(pairs, name, boot)[0] for name in QUESTION_SLICES},
        "gained": tuple(b.question_id for a, b in pairs if b.correct and not a.correct),
        "lost": tuple(a.question_id for a, b in pairs if a.correct and not b.correct),
        "n_changed": n_changed,
        "agreement": 1 - n_changed / len(pairs),
        "mean_kl": float(np.mean([_kl(p, q) for p, q in probabilities])) if known else None,
        "mean_total_variation": (
            float(np.mean([abs(p - q).sum() / 2 for p, q in probabilities])) if known else None
        ),
    }


def _by(
    pairs: Sequence[Row], slice_name: str, boot: Bootstrap
) -> tuple[dict[str, PairedDifference], list[Float64Array]]:
    """The difference in each part, corrected for their number, and each part's resamples."""
    firsts = [a for a, _ in pairs]
    parts: dict[str, list[Row]] = {label: [] for label in by(firsts, slice_name)}
    for label, pair in zip(SLICES[slice_name](firsts), pairs, strict=True):
        parts[label].append(pair)
    results = [_test(part, boot) for part in parts.values()]
    tests = _correct([test for test, _ in results])
    return dict(zip(parts, tests, strict=True)), [resampled for _, resampled in results]


def _kl(p: Float64Array, q: Float64Array) -> float:
    tiny = np.finfo(np.float64).tiny  # what underflowed is unlikely, not impossible
    return float((p * np.log(np.maximum(p, tiny) / np.maximum(q, tiny))).sum())


def _latency_ratio(
    baseline: RunRecord, candidate: RunRecord, rows: Sequence[Row], k: int, boot: Bootstrap
) -> Ratio:
    if reason := other_machine(baseline, candidate):
        return Ratio(None, reason=reason)
    times = [(row[0].latency_s, row[k].latency_s) for row in rows]
    logs = np.array([np.log(b / a) for a, b in times if a and b], dtype=np.float64)
    if not len(logs):
        return Ratio(None, reason="no question was timed in both runs")
    low, high = (None if log is None else float(np.exp(log)) for log in boot.mean(logs))
    return Ratio(float(np.exp(logs.mean())), low, high)


def _memory_ratio(baseline: RunRecord, candidate: RunRecord) -> Ratio:
    # Every stream has its own working memory, and so has every thread.
    reason = other_machine(baseline, candidate, ("threads", "streams", "scenario", "reuse"))
    if reason:
        return Ratio(None, reason=reason)
    return _observed_ratio(baseline, candidate, "peak_memory_bytes")


def _observed_ratio(baseline: RunRecord, candidate: RunRecord, name: str) -> Ratio:
    a, b = baseline.observed.get(name), candidate.observed.get(name)
    return Ratio(b / a) if a and b else Ratio(None, reason="not measured in both runs")


def _rank(
    records: Sequence[RunRecord],
    names: Sequence[str],
    scored: Sequence[Row],
    tested: Mapping[tuple[int, int], PairedDifference],
) -> tuple[Place, ...]:
    """The runs by accuracy, with the groups of which no two are told apart."""
    results = [micro_accuracy([row[k] for row in scored]) for k in range(len(records))]
    order = sorted(range(len(records)), key=lambda k: -results[k].n_correct)
    # Every two told apart are parted wherever they stand together. Source: Piepho 2004, "An
    # algorithm for a letter-based representation of all-pairwise comparisons".
    alike = [frozenset(order)]
    for pair in (frozenset(pair) for pair, test in tested.items() if test.p_holm < ALPHA):
        parts = [a - {k} if pair <= a else a for a in alike for k in pair]
        alike = [a for a in dict.fromkeys(parts) if not any(a < other for other in parts)]
    alike.sort(key=lambda a: sorted(order.index(k) for k in a))
    return tuple(
        Place(
            run=names[k],
            path=records[k].path,
            accuracy=results[k].n_correct / len(scored),
            ci_low=results[k].ci_low,
            ci_high=results[k].ci_high,
            alike=tuple(number for number, a in enumerate(alike, start=1) if k in a),
        )
        for k in order
    )
