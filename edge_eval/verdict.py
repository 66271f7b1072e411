"""Ranking -> what `compare` prints: a sentence for each comparison, the tables, the JSON form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edge_eval.compare import ALPHA, Comparison, PairedDifference, Ranking, Ratio
from edge_eval.metrics import slice_label
from edge_eval.tables import fact_table, figure_table, print_table

N_IDS_SHOWN = 8
MAX_HEADING = 16  # characters


def comparison_json(ranking: Ranking) -> dict[str, Any]:
    """Every figure and every question id, with each comparison's sentence."""
    return {
        "ranking": [dataclasses.asdict(place) for place in ranking.places],
        "comparisons": [
            {"sentence": describe(c), **dataclasses.asdict(c)} for c in ranking.comparisons
        ],
    }


def describe(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    c = comparison
    questions = f"{c.n_changed:,} of {c.micro.n:,} questions"
    words = [
        f"{c.candidate} answers {questions} differently"
        if c.n_changed
        else f"{c.candidate} answers every question as {c.baseline} does",
        _accuracy_words(c),
        _speed_words(c.latency),
    ]
    if share := c.memory.value:
        needs = f"needs {share:.2f} {'of' if share < 1 else 'times'} the memory"
        if f"{share:.2f}" == "1.00":
            needs = "needs as much memory"
        words[-1] += f" and {needs}" if c.latency.value else f"; it {needs}"
    sentence = "; ".join(words) + "."
    if c.unlike:
        fields = "; ".join(map(str, c.unlike))
        return f"Forced, on {c.n_common:,} common questions of unlike runs ({fields}): {sentence}"
    return sentence


def _accuracy_words(c: Comparison) -> str:
    if not c.micro.n_gained + c.micro.n_lost:
        return "it is right on exactly the same questions"
    found = f"{_points(c.micro.difference)} points"
    if c.micro.ci_low is not None:
        found += f", {_interval(c.micro.ci_low, c.micro.ci_high)}"
    if c.micro.p_holm >= ALPHA:
        return f"its accuracy is not distinguishable from {c.baseline}'s ({found})"
    how = "higher" if c.micro.difference > 0 else "lower"
    return f"its accuracy is {how} than {c.baseline}'s ({found})"


def _speed_words(latency: Ratio) -> str:
    if latency.value is None:
        return f"its speed is not compared ({latency.reason})"
    low, high = latency.ci_low, latency.ci_high
    if low is None or high is None or low <= 1 <= high:
        return "it is neither faster nor slower as far as can be told"
    times = max(latency.value, 1 / latency.value)
    how = "faster" if latency.value < 1 else "slower"
    return f"it is {times:.{1 if times >= 1.1 else 3}f} times {how}"


def print_comparison(ranking: Ranking, console: Console) -> None:
    """The runs ranked where there are several, then each comparison with its tables."""
    if len(ranking.places) > 2:
        print_table(console, _ranking_table(ranking))
        console.print(
            "Runs that share a group number cannot be told apart (McNemar, Holm over all pairs).\n",
            soft_wrap=True,
        )
    for c in ranking.comparisons:
        console.print(describe(c), style="bold", soft_wrap=True, markup=False)
        if c.n_unscored:
            console.print(f"Left out, not scored in every run: {c.n_unscored:,} questions.")
        print_table(console, _difference_table(c))
        print_table(console, _slices_table(c))
        for what, ids in (("gained", c.gained), ("lost", c.lost)):
            shown = ", ".join(ids[:N_IDS_SHOWN]) + (", ..." if len(ids) > N_IDS_SHOWN else "")
            console.print(
                f"{what} {len(ids):,}{': ' if ids else ''}{shown}", soft_wrap=True, markup=False
            )
        print_table(console, _cost_table(c))


def _ranking_table(ranking: Ranking) -> Table:
    table = figure_table("run", "accuracy %", "95 % interval", "group")
    for place in ranking.places:
        interval = "-"
        if place.ci_low is not None and place.ci_high is not None:
            interval = f"{place.ci_low * 100:.1f} to {place.ci_high * 100:.1f}"
        groups = " ".join(map(str, place.alike))
        table.add_row(escape(place.run), f"{place.accuracy * 100:.1f}", interval, groups)
    return table


def _headings(c: Comparison) -> tuple[str, str]:
    """The runs' names where a column holds them; the sentence above has them in full."""
    if max(len(c.baseline), len(c.candidate)) > MAX_HEADING:
        return "baseline", "candidate"
    return escape(c.baseline), escape(c.candidate)


def _paired_table(names: str, c: Comparison) -> Table:
    return figure_table(names, "n", *_headings(c), "points", "95 % interval", "p (Holm)")


def _difference_table(c: Comparison) -> Table:
    table = _paired_table("accuracy", c)
    _add_rows(table, c.groups)
    # Forty tasks would bury the groups: those that stand out are named, the JSON has them all.
    _add_rows(table, {k: task for k, task in c.tasks.items() if task.p_holm < ALPHA})
    table.add_section()
    _add_rows(table, {"micro (all)": c.micro}, style="bold")
    macro = _interval(c.macro_ci_low, c.macro_ci_high)
    name = f"macro ({len(c.tasks)} tasks)"
    table.add_row(name, str(c.micro.n), "", "", _points(c.macro_difference), macro, "")
    return table


def _slices_table(c: Comparison) -> Table:
    table = _paired_table("kind of question", c)
    for name, parts in c.slices.items():
        _add_rows(table, {slice_label(name, part): d for part, d in parts.items()})
    return table


def _add_rows(
    table: Table, differences: Mapping[str, PairedDifference], style: str | None = None
) -> None:
    for name, d in differences.items():
        shares = [f"{share * 100:.1f}" for share in (d.baseline, d.candidate)]
        interval = _interval(d.ci_low, d.ci_high)
        p = f"{d.p_holm:.3f}" if d.p_holm >= 0.001 else "<0.001"
        table.add_row(name, str(d.n), *shares, _points(d.difference), interval, p, style=style)


def _cost_table(c: Comparison) -> Table:
    table = fact_table()
    table.add_row("same option chosen", f"{c.agreement * 100:.1f} % of {c.micro.n:,} questions")
    table.add_row(
        "letters' probabilities",
        "not computed: a run does not know the probability of every letter"
        if c.mean_kl is None or c.mean_total_variation is None
        else f"mean KL {c.mean_kl:.4f} nats, mean total variation {c.mean_total_variation:.4f}",
    )
    for name, ratio in (("latency", c.latency), ("peak memory", c.memory), ("size", c.size)):
        baseline, candidate = _headings(c)
        runs = f"{candidate} / {baseline}"
        table.add_row(f"{name}, {runs}", escape(_ratio(ratio)))
    return table


def _ratio(ratio: Ratio) -> str:
    if ratio.value is None:
        return ratio.reason or "-"
    if ratio.ci_low is None or ratio.ci_high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.ci_low:.3f} to {ratio.ci_high:.3f})"


def _points(share: float) -> str:
    points = round(share * 100, 1)
    return f"{points:+.1f}" if points else "0.0"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{_points(low)} to {_points(high)}"
