"""A table in a narrow terminal: folded, never with a figure broken or lost."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from edge_eval.tables import fact_table, figure_table, print_table

ROWS = [
    ("STEM", "1,634", "29.4", "-36.4 to +54.5", "<0.001"),
    ("Social Science", "92", "33.7 ± 2.3", "24.9 to 43.8", "1.000"),
    ("العلوم الإنسانية", "53", "-", "-", ""),
]


def printed(width: int) -> list[str]:
    table = figure_table("accuracy", "n", "candidate", "95 % interval", "p (Holm)")
    for row in ROWS:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@given(st.integers(1, 120))
def test_every_figure_stands_whole_at_any_width(width: int) -> None:
    words = [word for line in printed(width) for word in line.split()]
    for row in ROWS:
        for cell in row[1:]:
            for figure in cell.split():
                assert figure in words


@pytest.mark.parametrize("width", [40, 60, 80])
def test_lines_are_as_long_as_the_terminal_at_most(width: int) -> None:
    assert max(map(cell_len, printed(width))) <= width


def test_a_name_is_whole_where_there_is_room_for_words() -> None:
    lines = printed(60)
    assert any("Social Science" in line for line in lines)
    assert any("العلوم الإنسانية" in line for line in lines)


def test_a_table_that_fits_is_wide() -> None:
    assert len(printed(80)) == 1 + len(ROWS)
    assert "p (Holm)" in printed(80)[0]


def test_words_about_a_fact_are_folded_between_words() -> None:
    table = fact_table()
    table.add_row("latency, single-stream", "p50 168 ms, p90 1,258 ms (n = 14,455)")
    console = Console(file=io.StringIO(), width=30)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue().split()
    assert {"168", "1,258", "14,455)", "single-stream"} <= set(words)


def test_markup_in_a_name_is_not_counted() -> None:
    table = figure_table("run", "%")
    table.add_row("[bold]ab[/bold]", "12.5")
    console = Console(file=io.StringIO(), width=9)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1].split() == ["ab", "12.5"]
