"""Tables on a terminal of any width: no figure is ever broken or cut.

Where a table does not fit, names and headings are folded and intervals take two lines; where even
that does not fit, its lines are longer than the terminal's, which goes on below.
"""

from collections.abc import Callable, Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

MIN_NAME = 8  # characters of a name's line, unless all are shorter
GAP, SMALL_GAP = 2, 1  # between columns


def figure_table(names: str, *figures: str) -> Table:
    """An empty table of names at the left and a column of figures under each other heading."""
    table = Table(names, box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def fact_table() -> Table:
    """An empty table of names, and a few words for each."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    table.add_column()
    table.add_column()
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table, its columns narrowed where the console is: see above."""
    natural = [_widest(column, str.splitlines) for column in table.columns]
    if sum(natural) + GAP * (len(natural) - 1) > console.width:
        widths = [_least(column, is_name=i == 0) for i, column in enumerate(table.columns)]
        words = [_widest(column, str.split) for column in table.columns]
        gaps = len(widths) - 1
        gap = GAP if sum(map(max, widths, words)) + GAP * gaps <= console.width else SMALL_GAP
        spare = console.width - sum(widths) - gap * gaps
        for wanted in (words, natural):  # whole words first
            for i, width in enumerate(wanted):
                more = max(0, min(width - widths[i], spare))
                widths[i] += more
                spare -= more
        for column, width in zip(table.columns, widths, strict=True):
            column.width, column.overflow = width, "fold"
        table.padding = (0, gap, 0, 0)
        table.width = sum(widths) + gap * gaps
    console.print(table, soft_wrap=True)


def _least(column: Column, *, is_name: bool) -> int:
    """The width that keeps every figure whole, and names readable."""
    words = [word for cell in _texts(column.cells) for word in cell.split()]
    figures = [word for word in words if not is_name and any(map(str.isdigit, word))]
    name = min(MIN_NAME, max(map(cell_len, words), default=1))
    return max(name, max(map(cell_len, figures), default=1))


def _widest(column: Column, parts: Callable[[str], list[str]]) -> int:
    texts = _texts([column.header, *column.cells])
    return max((cell_len(part) for text in texts for part in parts(text)), default=1)


def _texts(cells: Iterable[object]) -> list[str]:
    return [Text.from_markup(str(cell)).plain for cell in cells]
