"""`localmoe bench tables`: measure the papers' tables, and write the page that shows them. Decides what is
loaded; what runs, and what a table shows, is the tables'."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from localmoe.cli.output import ProgressBars, note, print_table
from localmoe.cli.tables_options import EMULATED_LINK
from localmoe.core.config import DeviceName, EngineConfig
from localmoe.core.errors import BudgetError, HardwareError
from localmoe.hardware.cards import find_card
from localmoe.model.shapes import find_shape
from localmoe.tables.datasets import DATASETS, check_datasets
from localmoe.tables.engine_bench import Amount, Bench, EngineBench
from localmoe.tables.machine import LoadWatch
from localmoe.tables.page import render
from localmoe.tables.registry import TABLES, check_tables
from localmoe.tables.running import run_cells
from localmoe.tables.section import Section
from localmoe.tables.sharing import measure_sharing, sharing_section
from localmoe.tables.simulated_bench import SimulatedBench
from localmoe.tables.store import Results, Run, read_results, write_results


def run_tables(args: argparse.Namespace) -> None:
    """Run, or render.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    if args.render is not None:
        for path in render(_merged(args.results), args.render):
            note(f"Wrote {path}.")
        return
    tables = check_tables(args.tables or list(TABLES))
    amount = Amount(
        check_datasets(args.datasets or list(DATASETS)),
        args.limit,
        args.max_new_tokens,
        args.prompt_tokens,
        args.draft_length,
    )
    for name in args.shape or ():
        find_shape(name)
    results = _begin(args.json)
    if "2" in tables:
        results.sharing = results.sharing or measure_sharing()
        _keep(args.json, results)
        _print("2", "shape", sharing_section(results.sharing, results.runs))
    if tables == ("2",):
        return
    for bench in _benches(args, amount):
        try:
            run = run_cells(bench, tables, results, LoadWatch(), args.json, note)
        finally:
            bench.close()
        _print_run(tables, run)


def _begin(path: Path | None) -> Results:
    """What is there already; a file that cannot be written is refused now, not after an hour."""
    if path is None:
        return Results()
    # Path.exists would raise where the system refuses to look: of that the writing tells
    results = read_results(path) if os.path.exists(path) else Results()
    write_results(path, results)
    return results


def _keep(path: Path | None, results: Results) -> None:
    if path is not None:
        write_results(path, results)


def _benches(args: argparse.Namespace, amount: Amount) -> Iterator[Bench]:
    """One after the other; each is closed before the next is loaded."""
    if args.card is not None:
        card = find_card(args.card)
        for shape in args.shape:
            yield SimulatedBench(shape, card, amount, args.synthetic)
        return
    devices = _devices(args.device)
    if args.shape is not None:
        for shape in args.shape:
            yield from _loaded(args, amount, shape, devices[-1])
        return
    for device in devices:
        yield from _loaded(args, amount, None, device)


def _devices(wanted: DeviceName) -> list[DeviceName]:
    """The CPU, then the GPU, of those that are here and wanted.

    Raises:
        HardwareError: CUDA was asked for and is not there.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise HardwareError("No CUDA device was found: use --device cpu, or install the NVIDIA driver.")
    if wanted != "auto":
        return [wanted]
    return ["cpu", "cuda"] if has_cuda else ["cpu"]


def _loaded(
    args: argparse.Namespace, amount: Amount, shape: str | None, device: DeviceName
) -> Iterator[Bench]:
    """A loaded engine; what does not fit is said and left out where there is more to run."""
    link = args.emulated_link
    if device == "cpu" and link is None and shape is None:
        link = EMULATED_LINK
    emulated = link if device == "cpu" else None
    config = EngineConfig(device=device, emulated_link_bytes_per_s=emulated, drafter="self")  # the papers'
    model = (args.model or "demo") if shape is None else find_shape(shape)
    try:
        with ProgressBars() as progress:
            bench = EngineBench.load(model, config, amount, args.synthetic, progress)
    except BudgetError as error:
        if shape is None or len(args.shape) == 1:
            raise
        note(f"{shape} is left out: {error}")
        return
    yield bench


def _merged(paths: list[Path]) -> Results:
    """The runs of several files, those of later ones in the place of the same before.

    Raises:
        ConfigError: a file cannot be read.
    """
    merged = Results()
    for path in paths:
        results = read_results(path)
        merged.sharing = results.sharing or merged.sharing
        merged.notes |= results.notes
        for run in results.runs:
            mine = merged.run_of(run.subject)
            mine.load = run.load
            mine.cells |= run.cells
            mine.memory = run.memory or mine.memory
    return merged


def _print_run(tables: tuple[str, ...], run: Run) -> None:
    for name in tables:
        section = TABLES[name].section(run)
        if section is not None:
            _print(name, run.subject.label, section)


def _print(name: str, label: str, section: Section) -> None:
    table = TABLES[name]
    print_table(f"{table.source}: {table.title} ({label})", section.columns, section.rows)
    for target in section.targets:
        print(f"{'reached' if target.met else 'NOT REACHED'}: {target.text}")
    for reason in section.reasons:
        print(reason)
