"""The runs of the paper's four ways to ask -> a table, prompt language by alphabet, and what is real.

The cells answered the same questions, so they are told apart by paired tests, corrected for the
six pairs (compare.py).
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from edge_eval.compare import Ranking, compare
from edge_eval.metrics import micro_accuracy
from edge_eval.rescore import unrotated
from edge_eval.schema import RunRecord
from edge_eval.tables import figure_table, print_table

PROMPTS = {"en": "English prompt", "ar": "Arabic prompt"}
ALPHABETS = {"latin": "Latin letters", "arabic": "Arabic letters"}


def _cell(record: RunRecord) -> str:
    return record.config.template


def rank(records: Sequence[RunRecord]) -> Ranking:
    """The cells by accuracy, with the groups of which no two can be told apart."""
    return compare(records[0], records[1:], force=True)


def tabulate(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The matrix as JSON-able values."""
    names = {record.path: _cell(record) for record in records}
    accuracies = {
        _cell(record): micro_accuracy(unrotated(record.predictions)) for record in records
    }
    return {
        "model": records[0].manifest.name,
        "cells": {
            name: {
                "n_scored": accuracy.n_scored,
                "micro_accuracy": accuracy.value,
                "standard_error": accuracy.standard_error,
                "ci_low": accuracy.ci_low,
                "ci_high": accuracy.ci_high,
                "chance": accuracy.chance,
            }
            for name, accuracy in accuracies.items()
        },
        "ranking": [
            {"cell": names[place.path], "accuracy": place.accuracy, "alike": place.alike}
            for place in rank(records).places
        ],
    }


def print_matrix(records: Sequence[RunRecord], console: Console) -> None:
    """The table, then which cells can be told apart."""
    figures = tabulate(records)
    cells = figures["cells"]
    first = next(iter(cells.values()))
    console.print(
        f"[bold]{figures['model']}[/bold]: micro accuracy in % with its 95 % interval, the paper's "
        f"protocol, n = {first['n_scored']:,} questions, chance {first['chance'] * 100:.1f} %",
        soft_wrap=True,
    )
    table = figure_table("", *ALPHABETS.values())
    for prompt, title in PROMPTS.items():
        row = [cells[f"{prompt}-{alphabet}"] for alphabet in ALPHABETS]
        table.add_row(
            title,
            *(
                f"{c['micro_accuracy'] * 100:.1f} ({c['ci_low'] * 100:.1f} to {c['ci_high'] * 100:.1f})"
                if c["micro_accuracy"] is not None
                else "-"
                for c in row
            ),
        )
    print_table(console, table)
    console.print(_words(figures["ranking"]), soft_wrap=True)


def _words(ranking: Sequence[dict[str, Any]]) -> str:
    groups: dict[int, list[str]] = {}
    for place in ranking:
        for number in place["alike"]:
            groups.setdefault(number, []).append(place["cell"])
    if len(groups) == 1:
        return "No two of the four can be told apart (McNemar's exact test, Holm over six pairs)."
    parts = "; ".join(", ".join(names) for _, names in sorted(groups.items()))
    return (
        f"Cells that cannot be told apart stand together (McNemar's exact test, Holm over six pairs): "
        f"{parts}."
    )
