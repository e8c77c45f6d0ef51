"""How a table fits a terminal: titles of columns in several lines, and columns below each other where they do
not fit side by side. Prints nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len

_FRAME = 3  # a column's padding and line; the table has one line more


def lay_out(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[list[str], list[list[int]]]:
    """The titles, which may have ends of lines, and the columns of each part of the table, of which every one
    begins with the first column. No figure is cut, as long as one fits beside the first column at all."""
    cells = [max((cell_len(row[i]) for row in rows), default=0) for i in range(len(columns))]
    whole = [max(cell_len(title), cell) for title, cell in zip(columns, cells, strict=True)]
    if _total(whole) <= width:
        return list(columns), [list(range(len(columns)))]
    titles = [
        title if i == 0 else _broken(title, cell)
        for i, (title, cell) in enumerate(zip(columns, cells, strict=True))
    ]
    widths = [max(cell, *map(cell_len, title.split("\n"))) for title, cell in zip(titles, cells, strict=True)]
    parts = [[0]]
    for i in range(1, len(columns)):
        if len(parts[-1]) > 1 and _total(widths[j] for j in (*parts[-1], i)) > width:
            parts.append([0])
        parts[-1].append(i)
    return titles, parts


def _total(widths: Iterable[int]) -> int:
    return 1 + sum(width + _FRAME for width in widths)


def _broken(title: str, width: int) -> str:
    """As wide as the cells below it, or as its longest word."""
    least = max(map(len, title.split()), default=1)
    return textwrap.fill(title, max(width, least), break_long_words=False, break_on_hyphens=False)
