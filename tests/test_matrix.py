"""The paper's four ways to ask, told apart by paired tests."""

import json
from io import StringIO
from pathlib import Path

from rich.console import Console
from test_compare import outcomes, record

from edge_eval.evaluate import evaluate, evaluate_together
from edge_eval.matrix import print_matrix, tabulate
from edge_eval.schema import RunConfig, RunRecord

CELLS = [(prompt, letters) for prompt in ("en", "ar") for letters in ("latin", "arabic")]


def cells(patterns: list[str]) -> list[RunRecord]:
    return [
        record(outcomes(pattern), prompt=prompt, letters=letters, path=f"{prompt}-{letters}.jsonl")
        for (prompt, letters), pattern in zip(CELLS, patterns, strict=True)
    ]


def printed(records: list[RunRecord]) -> str:
    console = Console(file=StringIO(), width=120)
    print_matrix(records, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_cells_that_nothing_tells_apart_are_said_to_be_alike() -> None:
    assert "No two of the four can be told apart" in printed(cells(["1100"] * 4))


def test_a_cell_that_stands_out_is_told_apart() -> None:
    found = tabulate(cells(["1" * 40, *["0" * 40] * 3]))
    assert found["ranking"][0]["cell"] == "en-latin"
    assert {c["cell"]: c["alike"] for c in found["ranking"]}["en-latin"] == (1,)
    assert found["cells"]["en-latin"]["micro_accuracy"] == 1.0
    assert "en-latin; " in printed(cells(["1" * 40, *["0" * 40] * 3]))


def test_cells_run_together_answer_as_each_does_alone(tiny_model: Path, tmp_path: Path) -> None:
    configs = [
        RunConfig(model=str(tiny_model), prompt=p, letters=a, limit=10, threads=1, reuse="shared")
        for p, a in CELLS
    ]
    paths = [tmp_path / f"{config.template}.jsonl" for config in configs]
    together = evaluate_together(configs, paths)
    for config, found in zip(configs, together, strict=True):
        alone = evaluate(config, tmp_path / f"alone-{config.template}.jsonl")
        answers = {p.question_id: p.predicted for p in alone.predictions}
        assert {p.question_id: p.predicted for p in found.predictions} == answers
    assert json.dumps(tabulate(together), allow_nan=False)
    assert "Arabic prompt" in printed(together)
