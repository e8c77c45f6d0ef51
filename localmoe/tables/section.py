"""What a table gives the page: rows, charts, targets and reasons; and how its figures are written. Computes
no figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localmoe.engine.bench_row import Summary
from localmoe.tables.cells import Cell, Subject
from localmoe.tables.store import Run


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars: (group, values in the order of `series`; None: no bar)."""

    title: str
    unit: str
    series: tuple[str, ...]
    groups: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """Named lines of (x, y) points."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]


Chart = Bars | Lines


@dataclass(frozen=True, slots=True)
class Target:
    """Something to reach, and whether a run's figure does. The goal is worded alike for all runs."""

    goal: str
    figure: str
    met: bool

    @property
    def text(self) -> str:
        """Both in a line."""
        return f"{self.goal}: {self.figure}"


@dataclass(slots=True)
class Section:
    """One table of one run. reasons: why ours is worse than the paper's where it is."""

    columns: Sequence[str]
    rows: list[list[str]]
    charts: list[Chart] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Table:
    """One table or figure of a paper.

    Attributes:
        name: as of --tables.
        source: paper, and number of the table or figure.
        about: what it shows, what is run here, and how that differs.
        cells: what has to run for it.
        section: what it shows of a run; None where nothing of it was run.
    """

    name: str
    title: str
    source: str
    about: str
    cells: Callable[[Subject], list[Cell]]
    section: Callable[[Run], Section | None]


def value(figures: Summary | None, name: str) -> float | None:
    """A number among figures; None where it was not measured."""
    found = None if figures is None else figures.get(name)
    return float(found) if isinstance(found, (int, float)) else None


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def percent(number: float | None, digits: int = 1) -> str:
    """ "83.1 %", or a dash."""
    return "-" if number is None else f"{100 * number:.{digits}f} %"


def points(number: float | None, digits: int = 2) -> str:
    """A number that is in per cent already, or a dash."""
    return "-" if number is None else f"{number:.{digits}f} %"


def ms(seconds: float | None) -> str:
    """ "31.2 ms", or a dash."""
    return "-" if seconds is None else f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"


def times(number: float | None) -> str:
    """ "1.43 x", or a dash."""
    return "-" if number is None else f"{number:.2f} x"


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole, where both are known."""
    return part / whole if part is not None and whole else None


def gigabytes(num_bytes: float | None) -> str:
    """In 2^30 bytes, as the papers count."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f}"
