import html
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from test_compare import answer, record

from edge_eval.paper import BENCHMARK, TABLE_4, beside_paper, print_paper, why_not_beside
from edge_eval.questions import TASKS
from edge_eval.report import render_page
from edge_eval.schema import Prediction, RunRecord, Status


def benchmark_answers() -> Iterator[Prediction]:
    """The whole benchmark's questions as to their labels, all answered right."""
    number = 0
    for group, subjects in TASKS.items():
        for subject, levels in subjects.items():
            for level, n in levels.items():
                for _ in range(n):
                    yield answer(number, group=group, subject=subject, level=level)
                    number += 1


@pytest.fixture(scope="module")
def whole() -> RunRecord:
    return record(list(benchmark_answers()))


def group_sizes() -> list[int]:
    return [sum(sum(levels.values()) for levels in group.values()) for group in TASKS.values()]


def test_the_benchmark_has_forty_tasks_and_its_published_number_of_questions() -> None:
    assert len(BENCHMARK) == 40
    assert sum(BENCHMARK.values()) == 14455
    assert group_sizes() == [3193, 3504, 3628, 1646, 2484]


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: row.model)
def test_each_published_average_is_the_micro_average_of_its_groups(row: Any) -> None:
    weighted = sum(p * n for p, n in zip(row.percent[:-1], group_sizes(), strict=True)) / 14455
    # The random row is not of one run: 29.2 by the groups, printed as 29.0.
    assert weighted == pytest.approx(row.percent[-1], abs=0.2 if row.model == "random" else 0.07)


def test_a_whole_run_by_the_papers_protocol_stands_beside_it(whole: RunRecord) -> None:
    assert why_not_beside(whole) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": "lm-eval"}, "protocol: lm-eval"),
        ({"prompt": "ar"}, "template: ar-latin"),
        ({"letters": "arabic"}, "template: en-arabic"),
        ({"scoring": "per-character"}, "scoring: per-character"),
        ({"shots": 3}, "shots: 3, and the paper's is 0"),
        ({"chat_template": "auto"}, "chat template: auto"),
        ({"permute": True}, "rotated options: True"),
    ],
)
def test_another_protocol_is_named(changes: dict[str, Any], reason: str, whole: RunRecord) -> None:
    found = why_not_beside(replace(whole, config=replace(whole.config, **changes)))
    assert found is not None
    assert found.startswith(reason)


def test_a_part_of_the_benchmark_is_not_the_benchmark(whole: RunRecord) -> None:
    part = replace(whole, predictions=whole.predictions[:-1])
    assert why_not_beside(part) == (
        "data: 14,454 questions of rows.csv, and the paper's are the whole benchmark, 14,455 "
        "questions of 40 tasks"
    )


def test_an_interrupted_run_and_an_unscored_question_are_named(whole: RunRecord) -> None:
    assert why_not_beside(replace(whole, complete=False)) == "the run is not complete"
    lost = replace(whole.predictions[0], status=Status.TOO_LONG, predicted=None)
    unscored = replace(whole, predictions=(lost, *whole.predictions[1:]))
    assert why_not_beside(unscored) == "1 questions were not scored"


def test_the_run_stands_among_the_rows_by_its_average(whole: RunRecord) -> None:
    wrong = [replace(p, predicted=1) if p.index % 2 else p for p in whole.predictions]
    rows = beside_paper({whole.manifest.name: replace(whole, predictions=tuple(wrong))})
    (place,) = [i for i, row in enumerate(rows) if row.is_run]
    assert rows[place].percent[-1] == pytest.approx(50.0, abs=0.1)
    assert (rows[place - 1].model, rows[place + 1].model) == ("BLOOMZ 7B", "AceGPT-chat 13B")


def printed(run: RunRecord) -> str:
    console = Console(file=StringIO(), width=120, highlight=False)
    print_paper(run, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_table_or_the_reason_is_printed(whole: RunRecord) -> None:
    assert "tiny" in printed(whole)
    assert "Jais-chat 30B" in printed(whole)
    assert printed(record([answer(0)])).startswith("Not set beside the paper's Table 4: data: 1 ")


def test_the_report_sets_runs_beside_the_table_or_says_why_not(whole: RunRecord) -> None:
    asked_otherwise = replace(whole, config=replace(whole.config, shots=3), path="other.jsonl")
    page = render_page([whole, asked_otherwise], None, paper=True)
    assert "BLOOMZ 560M" in page
    assert page.count("is not set beside the paper") == 1
    assert "shots: 3, and the paper" in html.unescape(page)
    assert "BLOOMZ 560M" not in render_page([record([answer(1)])], None)
