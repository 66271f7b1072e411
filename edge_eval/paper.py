"""A run beside the paper's Table 4, or why it may not stand there; the numbers are TABLE_4.

Source: Koto et al. 2024, "ArabicMMLU: Assessing Massive Multitask Language Understanding in
Arabic", arXiv:2402.12840, Table 4: zero-shot accuracy with English prompt and Latin letters. Its
"Average" is the micro average and its column "Arabic Language" the group Language.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from edge_eval.metrics import by, micro_accuracy
from edge_eval.questions import TASKS
from edge_eval.schema import RunRecord, Status, task_name
from edge_eval.tables import figure_table, print_table

COLUMNS = (*TASKS, "micro (all)")

# Task -> its test questions in the whole benchmark.
BENCHMARK = {
    task_name(subject, level): n
    for subjects in TASKS.values()
    for subject, levels in subjects.items()
    for level, n in levels.items()
}


@dataclass(frozen=True, slots=True)
class Published:
    """A row of Table 4, or a run beside it."""

    model: str
    percent: tuple[float, ...]  # one per column: the groups in the paper's order, the average
    is_run: bool = False


def why_not_beside(record: RunRecord) -> str | None:
    """Why the run's accuracy is another quantity than the paper's; None when it is the same."""
    config = record.config
    asked = {
        "protocol": (config.protocol, "paper"),
        "template": (config.template, "en-latin"),
        "scoring": (config.scoring, "argmax"),
        "shots": (config.shots, 0),
        "chat template": (config.chat_template, "off"),
        "rotated options": (config.permute, False),
    }
    for name, (found, paper) in asked.items():
        if found != paper:
            return f"{name}: {found}, and the paper's is {paper}"
    if not record.complete:
        return "the run is not complete"
    # Counted by task, since the paper's data has many copies and no published hash of its rows.
    counts = Counter(p.task for p in record.predictions)
    if counts != BENCHMARK:
        return (
            f"data: {len(record.predictions):,} questions of {record.data.source}, and the paper's "
            f"are the whole benchmark, {sum(BENCHMARK.values()):,} questions of {len(BENCHMARK)} tasks"
        )
    n_unscored = sum(p.status is not Status.SCORED for p in record.predictions)
    return f"{n_unscored:,} questions were not scored" if n_unscored else None


def beside_paper(records: Mapping[str, RunRecord]) -> tuple[Published, ...]:
    """Table 4 with the runs, by their names, among its rows; ask why_not_beside first."""
    rows = [*TABLE_4, *(_as_row(name, record) for name, record in records.items())]
    return tuple(sorted(rows, key=lambda row: row.percent[-1]))


def _as_row(name: str, record: RunRecord) -> Published:
    groups = by(record.predictions, "group")
    results = [*(groups[group] for group in TASKS), micro_accuracy(record.predictions)]
    percent = tuple(100 * result.n_correct / result.n_scored for result in results)
    return Published(name, percent, is_run=True)


def print_paper(record: RunRecord, console: Console) -> None:
    """The run among Table 4's rows, or why it does not stand there."""
    if reason := why_not_beside(record):
        console.print(
            f"Not set beside the paper's Table 4: {reason}.", soft_wrap=True, markup=False
        )
        return
    table = figure_table("Table 4, %", *COLUMNS)
    for row in beside_paper({record.manifest.name: record}):
        cells = [f"{value:.1f}" for value in row.percent]
        table.add_row(row.model, *cells, style="bold" if row.is_run else None)
    print_table(console, table)


TABLE_4 = (
    Published("random", (29.5, 28.9, 28.6, 25.8, 32.3, 29.0)),
    Published("XGLM 1.7B", (30.0, 30.5, 31.2, 28.1, 34.6, 31.0)),
    Published("BLOOMZ 560M", (32.7, 30.4, 31.9, 26.5, 36.6, 31.9)),
    Published("BLOOMZ 1.1B", (30.4, 26.5, 30.1, 25.1, 28.1, 28.4)),
    Published("BLOOMZ 1.7B", (35.3, 39.0, 37.4, 37.2, 39.6, 37.7)),
    Published("BLOOMZ 3B", (40.4, 44.5, 43.8, 40.9, 48.5, 43.7)),
    Published("BLOOMZ 7B", (43.2, 48.0, 49.1, 49.9, 49.9, 47.8)),
    Published("mT0-small 300M", (31.1, 30.5, 29.4, 29.4, 33.2, 30.7)),
    Published("mT0-base 580M", (30.2, 30.9, 31.5, 28.2, 34.4, 31.2)),
    Published("mT0-large 1.2B", (31.1, 31.7, 31.6, 29.7, 35.7, 32.0)),
    Published("mT0-xl 3.7B", (38.7, 42.3, 40.1, 43.9, 43.5, 41.4)),
    Published("AraT5 220M", (29.9, 30.3, 33.0, 28.4, 32.0, 31.0)),
    Published("AraT5v2 220M", (31.4, 30.7, 32.8, 27.4, 34.7, 31.7)),
    Published("AraGPT2 1.7B", (33.0, 31.5, 35.8, 29.8, 37.4, 33.7)),
    Published("AceGPT-chat 13B", (47.3, 52.8, 53.9, 50.5, 58.5, 52.6)),
    Published("Jais-chat 30B", (56.2, 60.5, 65.5, 62.0, 68.2, 62.3)),
    Published("GPT-3.5", (53.8, 57.0, 57.5, 57.6, 63.8, 57.7)),
    Published("GPT-4", (70.2, 70.4, 73.2, 72.8, 76.9, 72.5)),
)
