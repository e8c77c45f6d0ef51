"""A run goes on where it was interrupted, keeps every finished setting, and says how long it takes."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from handmade import SUBJECT, plain

from localmoe.core.errors import ConfigError, TransferError
from localmoe.engine.bench_row import Summary
from localmoe.tables import machine
from localmoe.tables.cells import Cell
from localmoe.tables.running import cells_of, differing, run_cells
from localmoe.tables.store import Results, read_results, write_results

TABLES = ("3", "4", "fig12")


class FakeBench:
    """Counts what it measures, and breaks at the n-th setting."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.subject = SUBJECT
        self.memory = {"shared": 1, "kv": 2, "draft": 3, "slots": 4, "context": 5, "workspace": 6}
        self.measured: list[Cell] = []
        self._breaks_at = breaks_at

    def can_run(self, cell: Cell) -> bool:
        return not cell.switches.layer_batches

    def measure(self, cell: Cell) -> Summary:
        if len(self.measured) == self._breaks_at:
            raise TransferError("broken")
        self.measured.append(cell)
        return plain(cell)

    def close(self) -> None:
        pass


def test_an_interrupted_run_goes_on_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    path, told = tmp_path / "results.json", []
    broken = FakeBench(breaks_at=5)
    with pytest.raises(TransferError):
        run_cells(broken, TABLES, Results(), lambda: "busy", path, told.append)
    assert len(read_results(path).runs[0].cells) == 5
    again = FakeBench()
    run = run_cells(again, TABLES, read_results(path), lambda: "quiet", path, told.append)
    assert not set(broken.measured) & set(again.measured)
    assert [*broken.measured, *again.measured] == cells_of(again, TABLES)
    assert read_results(path).runs == [run] and run.load == "busy; then quiet" and run.memory["slots"] == 4
    third = FakeBench()
    run_cells(third, TABLES, read_results(path), lambda: "", path, told.append)
    assert third.measured == [] and told[-1].endswith("0 of 22 settings to run")
    assert list(tmp_path.iterdir()) == [path]


def test_other_amounts_are_another_run() -> None:
    results = Results()
    first = results.run_of(SUBJECT)
    assert results.run_of(replace(SUBJECT)) is first
    assert results.run_of(replace(SUBJECT, prompts=3)) is not first and len(results.runs) == 2


def test_settings_that_need_the_same_slots_and_draft_stand_side_by_side() -> None:
    cells = cells_of(FakeBench(), TABLES)
    needs = [(cell.switches.fused_draft, cell.num_slots) for cell in cells]
    assert len(cells) == len(set(cells)) == 22
    assert sum(a != b for a, b in pairwise(needs)) == len(set(needs)) - 1


def test_the_time_left_is_told_from_what_the_finished_ones_took() -> None:
    now, told = [0.0], []

    class Slow(FakeBench):
        def measure(self, cell: Cell) -> Summary:
            now[0] += 3.0
            return (
                {"refused": "too large"}
                if not self.measured and not self.measured.append(cell)
                else plain(cell)
            )

    run = run_cells(Slow(), ("4",), Results(), lambda: "", None, told.append, clock=lambda: now[0])
    assert told[0] == "measured: demo, cpu, emulated 100 MB/s link: 4 of 4 settings to run"
    assert "too large; 9 s left" in told[1] and "10.0 ms a token; 6 s left" in told[2]
    assert run.get(cells_of(FakeBench(), ("4",))[0]) is None, "what was refused has no figures"


def test_different_tokens_are_noticed_by_dataset() -> None:
    run = run_cells(FakeBench(), ("fig13",), Results(), lambda: "", None, lambda text: None)
    assert differing(run) == []
    run.cells[next(key for key in run.cells if key.startswith("c4"))]["tokens_sha256"] = "other"
    assert differing(run) == ["c4"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, "{}", '{"format": "localmoe tables 0"}',
     '{"format": "localmoe tables 1", "runs": [1]}',
     '{"format": "localmoe tables 1", "runs": [{"subject": {"name": 1}}], "notes": {}}'],
)  # fmt: skip
def test_a_file_that_holds_no_results_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json .*give another") as caught:
        read_results(path)
    assert str(caught.value).count(". ") == 0


def test_a_cell_without_figures_and_a_note_that_is_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    run_cells(FakeBench(), ("fig13",), Results(), lambda: "", path, lambda text: None)
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "notes": {"3": ["of", "two lines"]}}))
    with pytest.raises(ConfigError, match=r"The note on table '3' in .*x\.json is no text"):
        read_results(path)
    value["runs"][0]["cells"]["more"] = 5
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"x\.json .*give another"):
        read_results(path)


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (("subject", "slot_bytes"), 0, "run 1: 'slot_bytes' is no whole number from 1 on"),
        (("subject", "num_experts"), "8", "run 1: 'num_experts' is no whole number from 1 on"),
        (("subject", "device"), None, "run 1: 'device' is no text"),
        (("subject", "kind"), "guessed", "run 1: 'kind' is neither measured nor predicted"),
        (("subject", "whole_passes"), 1, "run 1: 'whole_passes' is neither true nor false"),
        (("subject", "datasets"), ["c4", 5], "run 1: 'datasets' is no list of texts"),
        (("load",), ["busy"], "run 1: 'load' is no text"),
        (("memory", "kv"), "much", "run 1: 'kv' of its memory is no whole number"),
        (("cells", "CELL", "tpot_s"), "fast", "run 1: 'tpot_s' is no number in 'CELL'"),
        (("cells", "CELL", "tpot_s"), 0, "run 1: 'tpot_s' is no time in 'CELL'"),
        (("cells", "CELL", "hit_rate"), 10**400, "run 1: 'hit_rate' is no number in 'CELL'"),
        (("cells", "CELL", "hit_rate"), math.nan, "run 1: 'hit_rate' is no number in 'CELL'"),
        (("cells", "CELL", "tokens_sha256"), [], "run 1: 'tokens_sha256' is no text in 'CELL'"),
        (("cells", "CELL"), {"refused": 3}, "run 1: 'refused' is no text in 'CELL'"),
        (("sharing",), {"kv": 5}, "table 2: 'shared_experts' is no whole number"),
    ],
)
def test_a_value_that_tables_cannot_reckon_with_is_named(
    place: tuple[str, ...], wrong: object, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    run_cells(FakeBench(), ("fig13",), Results(), lambda: "", path, lambda text: None)
    value = json.loads(path.read_text())
    value["runs"][0]["memory"] = dict.fromkeys(("shared", "kv", "draft", "slots", "context"), 1)
    path.write_text(json.dumps(value))
    cell = next(iter(read_results(path).runs[0].cells))
    inside = value if place == ("sharing",) else value["runs"][0]
    *above, last = (cell if name == "CELL" else name for name in place)
    for name in above:
        inside = inside[name]
    inside[last] = wrong
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError) as caught:
        read_results(path)
    said = words.replace("CELL", cell)
    assert str(caught.value) == f"{path} is damaged ({said}): mend it, or give another file."


def test_results_that_cannot_be_written_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "results.json"
    write_results(path, Results(notes={"3": "note"}))
    before = path.read_bytes()
    assert json.loads(before)["notes"] == {"3": "note"} and read_results(path) == Results(notes={"3": "note"})
    with monkeypatch.context() as disk, pytest.raises(ConfigError, match="cannot be written"):
        disk.setattr(os, "fsync", full)
        write_results(path, Results())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="name a file in a folder that exists"):
        write_results(tmp_path / "missing" / "results.json", Results())


def test_a_busy_machine_is_named_and_a_run_of_its_own_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [0.1, 2.0, 1.0]
    monkeypatch.setattr(machine, "core_counts", lambda: (2, 2))
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (loads.pop(0), 0.0, 0.0))
    watch = machine.LoadWatch()
    assert watch() == "load average 0.1 to 2.0 on 2 cores" and watch() == "load average 0.1 to 2.0 on 2 cores"
    for begin, later in ((1.1, 1.2), (0.1, 3.1)):
        loads[:] = begin, later
        assert machine.LoadWatch()().endswith("OTHER PROGRAMS WERE RUNNING, so times are not to be trusted")
