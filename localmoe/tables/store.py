"""The results file: what was measured where, cell by cell, kept so that an interrupted run goes on. Measures
nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from localmoe.core.bounded_file import read_text_bounded
from localmoe.core.errors import ConfigError
from localmoe.core.whole_file import write_whole
from localmoe.engine.bench_row import Summary
from localmoe.tables.cells import Cell, Subject, subject_from
from localmoe.tables.kept_values import wrong_run, wrong_sharing

MOST_BYTES = 64 << 20
FORMAT = "localmoe tables 1"


@dataclass(slots=True)
class Run:
    """One subject's cells. Beside its key a cell has its figures, or "refused" and why.

    Attributes:
        load: how busy the machine was meanwhile, for people.
        memory: of the loaded engine, bytes by owner; empty where nothing was loaded.
    """

    subject: Subject
    load: str = ""
    cells: dict[str, Summary] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def get(self, cell: Cell) -> Summary | None:
        """A cell's figures, if it was run and not refused."""
        found = self.cells.get(cell.key)
        return None if found is None or "refused" in found else found


@dataclass(slots=True)
class Results:
    """Runs, memory by sharing (table 2), and people's notes by table."""

    runs: list[Run] = field(default_factory=list)
    sharing: Summary = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def run_of(self, subject: Subject) -> Run:
        """The run of this very subject: the one that is there, or a new one."""
        for run in self.runs:
            if run.subject == subject:
                return run
        self.runs.append(Run(subject))
        return self.runs[-1]


def read_results(path: Path) -> Results:
    """What a file holds.

    Raises:
        ConfigError: it is not there, cannot be read, or is no results file.
    """
    try:
        value = json.loads(read_text_bounded(path, MOST_BYTES))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {path}: run 'localmoe bench tables --json {path}' first."
        ) from None
    except OSError as error:
        raise ConfigError(f"The results {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"The results {path} are no JSON file: give another, or delete it.") from None
    try:
        if value["format"] != FORMAT:
            raise KeyError("format")
        runs = [
            Run(subject_from(run["subject"]), run["load"], dict(run["cells"]), dict(run["memory"]))
            for run in value["runs"]
        ]
        sharing, notes = dict(value["sharing"]), dict(value["notes"])
        found = [(f"run {number}", wrong_run(run)) for number, run in enumerate(value["runs"], 1)]
        found.append(("table 2", wrong_sharing(sharing)))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path} holds no results of 'localmoe bench tables' (format '{FORMAT}'): give another file."
        ) from None
    for where, what in found:
        if what is not None:
            raise ConfigError(f"{path} is damaged ({where}: {what}): mend it, or give another file.")
    wrong = [table for table, note in notes.items() if not isinstance(note, str)]
    if wrong:  # people write them
        raise ConfigError(f"The note on table '{wrong[0]}' in {path} is no text: write one in quotes.")
    return Results(runs, sharing, notes)


def write_results(path: Path, results: Results) -> None:
    """Replace the file at once, when all of it is on the disk.

    Raises:
        ConfigError: it cannot be written.
    """
    value = {
        "format": FORMAT,
        "notes": results.notes,
        "sharing": results.sharing,
        "runs": [
            {
                "subject": run.subject.as_dict(),
                "load": run.load,
                "memory": run.memory,
                "cells": dict(sorted(run.cells.items())),
            }
            for run in results.runs
        ],
    }
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file at once, when all of it is on the disk.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder that exists."
        ) from None
