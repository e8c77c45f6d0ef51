"""What the command line prints: tables for people and progress on stderr, JSON on stdout. Computes
nothing."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from localmoe.cli.table_layout import lay_out
from localmoe.core.types import Progress as ProgressReport
from localmoe.core.units import format_seconds


def print_json(value: Mapping[str, object] | Sequence[object]) -> None:
    """One JSON value on one line of stdout."""
    # a terminal that lacks a character gets JSON's own escape of it
    takes_all = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    sys.stdout.write(json.dumps(value, ensure_ascii=not takes_all) + "\n")
    sys.stdout.flush()


def print_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; the first column is left-aligned, the others right. Where a terminal is too narrow,
    further columns follow below."""
    texts = [[str(cell) for cell in row] for row in rows]
    console = _stdout()
    titles, parts = lay_out(columns, texts, console.width)
    for part in parts:
        table = Table(title=title if part is parts[0] else None, title_justify="left")
        for i in part:
            table.add_column(titles[i], justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in texts:
            table.add_row(*(row[i] for i in part))
        console.print(table)


def print_pairs(title: str, pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values on stdout."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in pairs:
        table.add_row(name, str(value))
    _stdout().print(table)


def note(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(text + "\n")


def _stdout() -> Console:
    """As wide as the terminal; in a file or a pipe wide enough for every table."""
    width = None if sys.stdout.isatty() else 180
    return Console(width=width, markup=False, emoji=False)  # names may have brackets and colons


class ProgressBars:
    """Progress reports as bars on stderr, one a stage; a context manager."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, report: ProgressReport) -> None:
        if report.unit == "bytes":
            amount = f"{report.done / 1e9:.2f} of {report.total / 1e9:.2f} GB"
        else:
            amount = f"{report.done} of {report.total} {report.unit}"
        if report.seconds_left is not None:
            amount += f", {format_seconds(report.seconds_left)} left"
        if report.detail:
            amount += f", {report.detail}"
        if report.stage not in self._tasks:
            self._tasks[report.stage] = self._bars.add_task(report.stage, total=report.total, amount=amount)
        self._bars.update(self._tasks[report.stage], completed=report.done, total=report.total, amount=amount)


def percent(value: float | None) -> str:
    """ "83.1 %", or a dash where nothing was measured."""
    return "-" if value is None else f"{100 * value:.1f} %"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"
