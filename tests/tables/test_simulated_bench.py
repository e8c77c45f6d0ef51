"""Cells by simulation: a model lies on the card as the engine would put it there; more slots are faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localmoe.core.errors import ConfigError
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.hardware.cards import CARDS
from localmoe.tables.cells import RESIDENT, Cell
from localmoe.tables.engine_bench import RANDOM_TOKENS, Amount
from localmoe.tables.simulated_bench import SimulatedBench
from localmoe.tables.store import read_results

RESULTS = Path(__file__).parents[2] / "docs" / "results.json"
AMOUNT = Amount((RANDOM_TOKENS,), 1, 24, 40, 4)
SYNTHETIC = SyntheticSettings(parse_routing("sticky:0.5"), 0.9, 0.9)


@pytest.fixture(scope="module")
def bench() -> SimulatedBench:
    return SimulatedBench("qwen1.5-moe-a2.7b", CARDS["rtx-5090"], AMOUNT, SYNTHETIC)


def test_experts_and_draft_take_what_was_measured_of_the_shape(bench: SimulatedBench) -> None:
    """Packed, as a GPU's engine holds them."""
    runs = [run.subject for run in read_results(RESULTS).runs if run.subject.name == bench.subject.name]
    measured = next(subject for subject in runs if subject.kind == "measured")
    for name in ("slot_bytes", "draft_bytes", "num_layers", "num_experts", "experts_per_token"):
        assert getattr(bench.subject, name) == getattr(measured, name), name
    assert all(subject.slot_bytes == measured.slot_bytes for subject in runs), "the page's predictions too"


def test_more_slots_hit_more_often_and_are_faster(bench: SimulatedBench) -> None:
    few, more = (bench.measure(Cell(RANDOM_TOKENS, "moe-speq", 4, num_slots)) for num_slots in (96, 960))
    assert few["hit_rate"] < more["hit_rate"] and few["tpot_s"] > more["tpot_s"] > 0
    assert few["tokens_per_s"] == pytest.approx(1 / few["tpot_s"], rel=0.01)
    assert few["h2d_bytes_per_token"] > more["h2d_bytes_per_token"] > 0


@pytest.mark.parametrize("length", [0, 4])
def test_where_all_experts_are_there_from_the_beginning_nothing_is_copied(
    bench: SimulatedBench, length: int
) -> None:
    bound = bench.measure(Cell(RANDOM_TOKENS, RESIDENT, length, 1440))
    begun = bench.measure(Cell(RANDOM_TOKENS, "on-demand", length, 1440))
    assert (bound["hit_rate"], bound["h2d_bytes_per_token"]) == (1, 0) and begun["hit_rate"] < 1
    assert bound["tpot_s"] < begun["tpot_s"] and bound["steps"] == begun["steps"]


def test_what_the_card_has_no_room_for_is_refused(bench: SimulatedBench) -> None:
    small = SimulatedBench("qwen1.5-moe-a2.7b", CARDS["rtx-4060"], AMOUNT, SYNTHETIC)
    cell = Cell(RANDOM_TOKENS, "on-demand", 4, 96)
    assert "GB do not fit the" in str(small.measure(cell)["refused"])
    assert "refused" not in small.measure(replace(cell, draft_length=0)), "without the draft there is room"
    assert "refused" not in bench.measure(cell)


def test_lengths_that_learn_from_times_are_not_simulated(bench: SimulatedBench) -> None:
    assert bench.can_run(Cell(RANDOM_TOKENS, "on-demand", 4, 96))
    assert not bench.can_run(Cell(RANDOM_TOKENS, "on-demand", "auto", 96))


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody-knows"):
        SimulatedBench("nobody-knows", CARDS["rtx-5090"], AMOUNT, SYNTHETIC)
