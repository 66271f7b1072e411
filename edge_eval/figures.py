"""Run records -> Runs with their figures -> Figures, each rows that are drawn and tabled alike.

Unlike runs stand side by side, labelled, and on no common Pareto front; likeness.py says what must
agree.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unicodedata import category

import numpy as np

from edge_eval import charts, metrics
from edge_eval.charts import ACCURACY, CHANCE, HIGH, LOW, Row
from edge_eval.errors import RecordError
from edge_eval.likeness import CONDITIONS, MACHINE
from edge_eval.metrics import (
    Accuracy,
    Float64Array,
    Latency,
    LetterShare,
    MacroAccuracy,
    ReadAnswers,
)
from edge_eval.questions import SAMPLE_NOTE
from edge_eval.schema import Prediction, RunRecord

Cell: TypeAlias = str | int | float | None

PAPER_TEMPLATES = ("en-latin", "en-arabic", "ar-latin", "ar-arabic")
MANY_PARTS = 12  # a slice of more is folded away
MIN_BIN = 10  # latencies, so that quartiles mean something
MIN_STRETCH = 20  # questions of a run, for its drift
MAX_BINS = 25
MAX_LABEL = 60  # characters

# Accuracies are like for like when all these agree, costs when those of MACHINE do too.
SCORES: Mapping[str, Callable[[RunRecord], Any]] = {
    **CONDITIONS,
    "completeness": lambda r: r.complete,
}


@dataclass(frozen=True, slots=True)
class Run:
    """A record with its figures; what every entry of REPORT_COLUMNS is given."""

    number: int  # from 1, in the order given
    label: str  # tells the run from the others
    record: RunRecord
    micro: Accuracy
    macro: MacroAccuracy
    latency: Latency
    p50_interval_ms: tuple[float, float] | None  # 95 %, by order statistics
    ece: float | None
    brier: float | None
    letters: tuple[LetterShare, ...]
    answers: ReadAnswers | None  # of generated texts

    @property
    def status(self) -> str:
        return "complete" if self.record.complete else f"incomplete: {_progress(self.record)}"

    @property
    def verdict(self) -> str:
        """The interval against chance, in words."""
        low, high, chance = self.micro.ci_low, self.micro.ci_high, self.micro.chance
        if low is None or high is None or chance is None:
            return "nothing was scored"
        if low <= chance <= high:
            return "not distinguishable from chance"
        return "above chance" if low > chance else "below chance"

    @property
    def protocol(self) -> str:
        """All that decides which score the accuracy is."""
        config = self.record.config
        shots = f"{config.shots}-shot" if config.shots else "zero-shot"
        chat = "no chat template" if config.chat_template == "off" else "in a chat template"
        rotated = ", options rotated" if config.permute else ""
        tokens = f" from {config.max_new_tokens} tokens" if self.answers else ""
        scoring = f"{config.scoring}{tokens}"
        return f"{config.protocol} ({config.template}), {shots}, {scoring}, {chat}{rotated}"

    @property
    def data(self) -> str:
        data = self.record.data
        if data.kind == "sample":
            return f"edge-eval's sample ({SAMPLE_NOTE})"
        if data.kind == "hub":
            return f"{data.source} at {(data.revision or 'an unknown revision')[:8]}"
        return Path(data.source).name

    @property
    def machine(self) -> str:
        """Where and how the latencies were measured."""
        if not self.latency.n:
            return "nothing was timed"
        found, config = self.record.environment, self.record.config
        cpu = found.get("cpu_model") or found.get("architecture") or "unknown processor"
        if config.endpoint:
            return f"{config.endpoint}, at the client ({cpu}), network included"
        shared = ", prefixes shared" if config.reuse == "shared" else ""
        threads = found.get("threads")
        return f"{config.scenario}{shared}, {cpu}, {threads or 'unknown'} threads"


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and the table of the same rows."""

    title: str
    note: str
    rows: Sequence[Row]
    svg: str | None
    facts: Mapping[int, str] = field(default_factory=dict)  # run's number -> one figure of it
    folded: bool = False


def examine(records: Sequence[RunRecord], *, include_incomplete: bool = False) -> list[Run]:
    """The figures of each record. Errors: RecordError for none, or for an incomplete one."""
    if not records:
        raise RecordError("no run record was given: name one or more.")
    for record in records:
        if not record.complete and not include_incomplete:
            raise RecordError(
                f"{record.path or record.manifest.name} is incomplete: {_progress(record)}. Finish "
                "the run, or report it as it is with --include-incomplete."
            )
    return [
        Run(
            number=number,
            label=f"{number} · {label}",
            record=record,
            micro=metrics.micro_accuracy(record.predictions),
            macro=metrics.macro_accuracy(record.predictions),
            latency=metrics.latency(record.predictions),
            p50_interval_ms=_median_interval(_times(record)[1]),
            ece=metrics.expected_calibration_error(record.predictions),
            brier=metrics.brier_score(record.predictions),
            letters=metrics.letter_shares(record.predictions),
            answers=metrics.read_answers(record.predictions),
        )
        for number, (label, record) in enumerate(zip(_labels(records), records, strict=True), 1)
    ]


def _progress(record: RunRecord) -> str:
    n_asked = len({prediction.question_id for prediction in record.predictions})
    return f"{n_asked:,} of {record.data.n_selected:,} questions answered"


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """Model and precision, and whatever else tells the runs apart."""
    labels = [f"{record.manifest.name} {record.manifest.precision}" for record in records]
    tells: tuple[Callable[[RunRecord], str], ...] = (
        lambda r: r.config.template,
        lambda r: f"{r.config.shots}-shot",
        lambda r: f"chat template {r.config.chat_template}",
        lambda r: r.config.scenario,
        lambda r: f"{r.environment.get('threads') or 'unknown'} threads",
    )
    for tell in tells:
        if len(set(labels)) < len(labels) and len({tell(record) for record in records}) > 1:
            labels = [f"{label}, {tell(r)}" for label, r in zip(labels, records, strict=True)]
    return [plain(label)[:MAX_LABEL] for label in labels]


def find_notes(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before any figure."""
    notes = []
    if differing := _differing(runs, SCORES):
        notes.append(
            f"These runs are not like for like: they differ in {', '.join(differing)}. Their "
            "accuracies are no ranking, and no Pareto front joins unlike runs."
        )
    if differing := _differing(runs, MACHINE):
        notes.append(
            f"Latency and memory were not measured alike: the runs differ in {', '.join(differing)}."
        )
    if samples := [isolate(run.label) for run in runs if run.record.data.kind == "sample"]:
        who = "Every run" if len(samples) == len(runs) else ", ".join(samples)
        notes.append(
            f"{who} answered {SAMPLE_NOTE}: it shows that the tool works, not how good a model is."
        )
    for run in runs:
        name = isolate(run.label)
        if tool := run.record.observed.get("converted_from"):
            notes.append(
                f"{name} was converted from files of {plain(str(tool))}: its times are unknown."
            )
        if answers := run.answers:
            notes.append(
                f"{name}: {number(percent(answers.fallbacks.value))} % of the answers could not be "
                f"read from the text and are random options; of those read "
                f"{number(percent(answers.matched.value))} % are right, and with random ones at chance "
                f"the accuracy is {number(percent(answers.expected.value))} %."
            )
        if not run.record.complete:
            notes.append(f"{name} is {run.status}; its figures are of that part.")
        if run.record.config.permute:
            notes.append(
                f"{name} asked each question once per rotation of its options: n counts all."
            )
        counts = {
            "rows of the data refused": run.record.data.n_refused,
            "invalid, a logit not being finite": run.micro.n_invalid,
            "too long for the model": run.micro.n_too_long,
            "without a letter among the endpoint's likeliest tokens": run.micro.n_unseen,
            "tied, the first option taken": run.micro.n_tied,
        }
        if words := [f"{count:,} {what}" for what, count in counts.items() if count]:
            notes.append(f"{name}: {'; '.join(words)} (of {len(run.record.predictions):,} asked).")
    return notes


def _differing(
    runs: Sequence[Run], settings: Mapping[str, Callable[[RunRecord], Any]]
) -> list[str]:
    return [name for name, of in settings.items() if len({repr(of(r.record)) for r in runs}) > 1]


def _alike(run: Run) -> str:
    """The same for runs that may stand on one Pareto front."""
    values = [of(run.record) for of in (*SCORES.values(), *MACHINE.values())]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


# ---- text and numbers


def plain(text: str) -> str:
    """Text without control characters: nothing in it reorders or breaks what stands around it."""
    return "".join(" " if category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def isolate(text: str) -> str:
    """Text that keeps its own direction inside a sentence, by Unicode's isolates."""
    return f"\u2068{text}\u2069"


def number(value: Cell) -> str:
    """A cell for people: three digits that matter, and a dash for what is not known."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.{1 if abs(value) >= 10 else 2}f}"


def percent(share: float | None) -> float | None:
    """A share in percent."""
    return None if share is None else share * 100


def _short(value: float | None) -> float | None:
    """Four digits that matter: charts and tables need no more, and files stay small."""
    return None if value is None else float(f"{value:.4g}")


# ---- figures


def _row(run: Run, **fields: Cell) -> dict[str, Cell]:
    return {"run": run.label, "number": run.number, **fields}


def _accuracy_fields(accuracy: Accuracy) -> dict[str, Cell]:
    return {
        "n": accuracy.n_scored,
        ACCURACY: _short(percent(accuracy.value)),
        LOW: _short(percent(accuracy.ci_low)),
        HIGH: _short(percent(accuracy.ci_high)),
        CHANCE: _short(percent(accuracy.chance)),
    }


def trade_off(runs: Sequence[Run], cost: str, of: Callable[[Run], Any]) -> Figure:
    """Accuracy against a cost, with the Pareto front of the runs that are like for like."""
    points = [run for run in runs if run.micro.value is not None and of(run) is not None]
    rows = []
    for run in points:
        like = [other for other in points if _alike(other) == _alike(run)]
        beaten = any(_dominates(other, run, of) for other in like)
        front = "alone" if len(like) == 1 else "no" if beaten else "yes"
        fields = {cost: _short(of(run)), **_accuracy_fields(run.micro), "on the front": front}
        about = {"protocol": run.protocol, "scenario and machine": run.machine}
        rows.append(_row(run, **fields, **about, alike=_alike(run)))
    what = cost.split(" (")[0]
    note = (
        "Up and to the left is better; bars are 95 % intervals of the accuracy. The line is the Pareto "
        "front: among the runs that are like for like with one on it, none is better in both. Where "
        "bars overlap, the order may be noise: edge-eval compare pairs runs question by question."
    )
    if len(points) < len(runs):
        note += f" Not measured in {len(runs) - len(points)} of {len(runs)} runs."
    return Figure(f"Accuracy against {what}", note, rows, charts.trade_off(rows, cost))


def _dominates(other: Run, run: Run, of: Callable[[Run], Any]) -> bool:
    more_right = (other.micro.value or 0.0) - (run.micro.value or 0.0)
    saved = float(of(run) - of(other))
    return min(more_right, saved) >= 0 and max(more_right, saved) > 0


def accuracy_by(runs: Sequence[Run], slice_name: str) -> Figure:
    """Accuracy of each part of a slice, run by run."""
    heading = SLICE_TITLES.get(slice_name, slice_name.replace("_", " "))
    found = [metrics.by(run.record.predictions, slice_name) for run in runs]
    parts = dict.fromkeys(part for accuracies in found for part in accuracies)
    rows = [
        {heading: part, **_row(run, **_accuracy_fields(accuracies[part]))}
        for part in parts
        for run, accuracies in zip(runs, found, strict=True)
        if part in accuracies
    ]
    ceiling = metrics.ACCURACY_CEILING * 100
    svg = charts.intervals([row for row in rows if row["n"]], heading, ceiling)
    return Figure(f"By {heading}", "", rows, svg, folded=len(parts) > MANY_PARTS)


SLICE_TITLES = {
    "n_options": "number of options",
    "negation": "negation in the question",
    "length": "length of the question, in thirds",
}


def prompt_matrices(runs: Sequence[Run]) -> list[tuple[str, dict[str, Run]]]:
    """Model -> template -> run, where two or more of the paper's four are otherwise alike."""
    found: dict[tuple[str, ...], dict[str, Run]] = {}
    others = [of for name, of in SCORES.items() if name != "template"]
    for run in runs:
        if run.record.config.template in PAPER_TEMPLATES:
            manifest = run.record.manifest
            values = [repr(of(run.record)) for of in others]
            key = (plain(f"{manifest.name} {manifest.precision}"), repr(manifest.files), *values)
            found.setdefault(key, {}).setdefault(run.record.config.template, run)
    return [(name, cells) for (name, *_), cells in found.items() if len(cells) > 1]


def letter_choice(runs: Sequence[Run]) -> Figure:
    """How often each letter was chosen and how often it was right."""
    rows = []
    for run in runs:
        letters = max((p.letters for p in run.record.predictions), key=len, default=())
        for share in run.letters:
            counts = {"n offered": share.n_offered, "n chosen": share.n_chosen}
            shares = {"chosen (%)": share.chosen * 100, "right (%)": share.right * 100}
            rows.append(
                _row(run, letter=letters[share.option], **counts, **{"n right": share.n_answer})
                | {name: _short(value) for name, value in shares.items()}
            )
    note = (
        "A model that does not know often prefers a letter. Shares are of all scored questions, those "
        "included that do not offer the letter."
    )
    return Figure("Letters chosen against letters right", note, rows, charts.letters(rows))


def reliability(runs: Sequence[Run]) -> Figure:
    """Accuracy against confidence, in the bins of metrics.expected_calibration_error."""
    rows = []
    for run in runs:
        bins: dict[int, list[tuple[float, Prediction]]] = {}
        for p in run.record.predictions:
            if p.predicted is not None and metrics.has_probabilities(p):
                confidence = float(metrics.letter_probabilities(p)[p.predicted])
                edge = max(int(np.ceil(confidence * metrics.N_CALIBRATION_BINS)), 1)
                bins.setdefault(edge, []).append((confidence, p))
        for _, members in sorted(bins.items()):
            mean = _short(100 * sum(confidence for confidence, _ in members) / len(members))
            accuracy = metrics.micro_accuracy([p for _, p in members])
            rows.append(_row(run, **{charts.CONFIDENCE: mean}, **_accuracy_fields(accuracy)))
    facts = {
        run.number: f"ECE {number(run.ece)}, Brier score {number(run.brier)}, "
        f"n = {run.micro.n_scored:,}"
        for run in runs
    }
    note = (
        "Confidence is the softmax of the chosen letter among the letters offered. On the diagonal a "
        "model is right as often as it says; below it, it is too sure. ECE is the mean distance from "
        "the diagonal, 0 at best; the Brier score is 0 at best and 2 at worst."
    )
    return Figure("Reliability", note, rows, charts.reliability(rows), facts)


def latency_distribution(runs: Sequence[Run]) -> Figure:
    """The share of forward passes that took no longer than a time."""
    rows = []
    for run in runs:
        _, ms = _times(run.record)
        shares = range(0, 101, 2) if len(ms) else range(0)
        for share, value in zip(shares, np.percentile(ms, shares) if len(ms) else (), strict=True):
            fields = {charts.WITHIN: share, charts.LATENCY: _short(float(value)), "n": len(ms)}
            rows.append(_row(run, **fields))
    note = f"The share of forward passes that took no longer than a time. {_measured(runs)}"
    return Figure("Latency distribution", note, rows, charts.cumulative(rows))


def latency_by_length(runs: Sequence[Run]) -> Figure:
    """Latency against the prompt's tokens, with the least-squares fit."""
    rows, facts = [], {}
    for run in runs:
        tokens, ms = _times(run.record)
        fit = run.latency.fit
        if fit:
            line = f"{number(fit.fixed_ms)} ms + {number(fit.ms_per_token)} ms per token"
            facts[run.number] = f"{line}, n = {run.latency.n:,}"
        for part in _parts(np.argsort(tokens, kind="stable"), MIN_BIN):
            length = float(tokens[part].mean())
            quartiles = [_short(float(value)) for value in np.percentile(ms[part], (25, 50, 75))]
            fields = dict(zip(charts.QUARTILES, quartiles, strict=True))
            expected = _short(fit.fixed_ms + fit.ms_per_token * length) if fit else None
            row = _row(run, **{charts.TOKENS: _short(length), "n": len(part)}, **fields)
            rows.append(row | {charts.FIT: expected})
    note = (
        "Median and middle half of prompts of about one length; dashed, the least-squares fit over "
        f"all. {_measured(runs)}"
    )
    return Figure("Latency against prompt length", note, rows, charts.by_length(rows), facts)


def drift(runs: Sequence[Run]) -> Figure:
    """Latency over what the fit expects, through the run."""
    rows, facts = [], {}
    for run in runs:
        tokens, ms = _times(run.record)
        config = run.record.config
        # Otherwise the record's order, the data's, is not the order in which prompts were run.
        if not (fit := run.latency.fit) or (config.scenario, config.reuse) != IN_ORDER:
            continue
        if run.latency.drift:
            facts[run.number] = f"last tenth over first {number(run.latency.drift)}"
        ratio = ms / np.maximum(fit.fixed_ms + fit.ms_per_token * tokens, 1e-9)
        for part in _parts(np.arange(len(ms)), MIN_STRETCH):
            done = 100 * (float(part.mean()) + 0.5) / len(ms)
            slower = float(np.median(ratio[part]))
            fields = {charts.DONE: _short(done), "n": len(part), charts.SLOWER: _short(slower)}
            rows.append(_row(run, **fields))
    note = (
        "Median latency over what the fit expects of such prompts: a machine that throttles climbs "
        f"above 1. The last tenth over the first is said from {metrics.DRIFT_MIN_SAMPLES} questions "
        f"on, and only of runs that answered in the data's order. {_measured(runs)}"
    )
    return Figure("Drift over the run", note, rows, charts.drift(rows), facts)


IN_ORDER = ("single-stream", "none")


def _parts(order: Any, smallest: int) -> list[Any]:
    n_parts = min(MAX_BINS, len(order) // smallest)
    return np.array_split(order, n_parts) if n_parts > 1 else []


def _times(record: RunRecord) -> tuple[Float64Array, Float64Array]:
    """Tokens and ms of the passes that were timed, in the record's order."""
    timed = [(p.n_tokens, p.latency_s) for p in record.predictions if p.latency_s is not None]
    table = np.array(timed, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1] * 1e3


def _median_interval(ms: Float64Array) -> tuple[float, float] | None:
    from scipy.stats import binom

    # The order statistics between which the median lies with 95 %: none for fewer than six.
    rank = int(binom.ppf((1 - metrics.CONFIDENCE) / 2, len(ms), 0.5)) if len(ms) else 0
    ordered = np.sort(ms)
    return (float(ordered[rank - 1]), float(ordered[-rank])) if rank else None


def _measured(runs: Sequence[Run]) -> str:
    return "Measured: " + "; ".join(dict.fromkeys(run.machine for run in runs)) + "."
