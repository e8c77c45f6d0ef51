"""Runs what tables need and is not there yet, cell by cell, and keeps each result at once. Chooses no
cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from localmoe.core.units import format_seconds
from localmoe.tables.cells import Cell
from localmoe.tables.engine_bench import Bench
from localmoe.tables.registry import TABLES
from localmoe.tables.section import ms, value
from localmoe.tables.store import Results, Run, write_results

Tell = Callable[[str], None]


def cells_of(bench: Bench, tables: Sequence[str]) -> list[Cell]:
    """What the tables need of a subject, each once; side by side what is compared and what needs the same
    slots and the same draft."""
    cells = dict.fromkeys(cell for name in tables for cell in TABLES[name].cells(bench.subject))
    order = {name: place for place, name in enumerate(bench.subject.datasets)}

    def place(cell: Cell) -> tuple[bool, int, int]:
        return not cell.switches.fused_draft, cell.num_slots, order.get(cell.dataset, len(order))

    return sorted((cell for cell in cells if bench.can_run(cell)), key=place)


def run_cells(
    bench: Bench,
    tables: Sequence[str],
    results: Results,
    load: Callable[[], str],
    path: Path | None,
    tell: Tell,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Run what is missing; the file at `path` has every finished cell. load: says how busy the machine is.

    Raises:
        LocalMoeError: a cell failed, or the file cannot be written; finished cells are kept.
    """
    run = results.run_of(bench.subject)
    cells = cells_of(bench, tables)
    missing = [cell for cell in cells if cell.key not in run.cells]
    tell(f"{run.subject.label}: {len(missing)} of {len(cells)} settings to run")
    began, before = clock(), f"{run.load}; then " if run.cells else ""
    for done, cell in enumerate(missing):
        figures = run.cells[cell.key] = bench.measure(cell)
        run.memory = run.memory or bench.memory
        run.load = before + load()
        if path is not None:
            write_results(path, results)
        left_s = (clock() - began) / (done + 1) * (len(missing) - done - 1)
        told = figures.get("refused") or f"{ms(value(figures, 'tpot_s'))} a token"
        tell(f"{done + 1} of {len(missing)}: {cell.key}: {told}; {format_seconds(left_s)} left")
    return run


def differing(run: Run) -> list[str]:
    """Datasets whose cells did not all give the same tokens; none may differ where acceptance is the
    model's."""
    found: dict[str, set[object]] = {}
    for key, figures in run.cells.items():
        if "tokens_sha256" in figures:
            found.setdefault(key.partition(" / ")[0], set()).add(figures["tokens_sha256"])
    return sorted(name for name, digests in found.items() if len(digests) > 1)
