"""What run and show print: every number with its n, and the JSON form says the same."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from test_compare import answer, outcomes, record

from edge_eval.metrics import QUESTION_SLICES, SLICES
from edge_eval.schema import DataFingerprint, RunRecord, Status
from edge_eval.summary import print_summary, summarize


def printed(run: RunRecord, width: int = 120, *, slices: bool = False) -> str:
    console = Console(file=StringIO(), width=width)
    print_summary(run, console, slices=slices)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_json_form_is_strict_and_holds_what_the_table_shows() -> None:
    figures = summarize(record(outcomes("1101")))
    assert json.loads(json.dumps(figures, allow_nan=False))["n_scored"] == 4
    assert figures["micro_accuracy"]["value"] == 0.75
    text = printed(record(outcomes("1101")))
    assert "75.0" in text
    assert "micro (all)" in text


def test_questions_too_long_are_counted_and_both_accuracies_shown() -> None:
    answers = outcomes("1111")
    answers[3] = replace(answers[3], status=Status.TOO_LONG, predicted=None, latency_s=None)
    run = record(answers)
    text = printed(run)
    assert "too long for the model: 1" in text
    assert "micro, unscored as wrong" in text
    assert "75.0" in text
    assert "100.0" in text
    assert summarize(run)["micro_accuracy"]["value_of_all"] == 0.75


def test_nothing_scored_is_no_division_by_zero() -> None:
    text = printed(record([replace(answer(0), status=Status.INVALID, predicted=None)]))
    assert "invalid (a logit was not finite): 1" in text


def test_a_sample_says_that_it_is_one() -> None:
    run = record(outcomes("11"))
    run = replace(run, data=DataFingerprint("sample", "sample", None, "aa" * 32, 2, 0, 2))
    assert "not the benchmark" in printed(run)


def test_an_interrupted_run_says_so_first() -> None:
    run = record(outcomes("11"), complete=False)
    assert "Interrupted:" in printed(run)


def test_kinds_of_questions_are_printed_when_asked_for() -> None:
    answers = [
        answer(0, negated=True, n_characters=10),
        answer(1, has_context=True, n_characters=90),
        answer(2, 1, n_characters=200),
    ]
    text = printed(record(answers), slices=True)
    for part in ("negated", "with context", "short questions", "long questions", "4 options"):
        assert part in text
    assert "with context" not in printed(record(answers))
    assert set(summarize(record(answers))["slices"]) == set(QUESTION_SLICES) <= set(SLICES)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_tables_keep_every_row_at_any_width(width: int) -> None:
    text = printed(record(outcomes("1101")), width)
    assert "STEM" in text
    assert "75.0" in text
