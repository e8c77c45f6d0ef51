"""Cells on a real engine: the slots, policy, lengths and switches that they name, and figures of what ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.shapes import tiny_shape

from localmoe.core.config import EngineConfig
from localmoe.core.errors import DraftError, LocalMoeError
from localmoe.core.switches import Switches
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.tables.cells import RESIDENT, Cell
from localmoe.tables.engine_bench import RANDOM_TOKENS, Amount, EngineBench
from localmoe.tables.registry import TABLES

Tiny = Callable[[str], tuple[Path, Any]]
AMOUNT = Amount(("gsm8k", "c4"), 2, 6, 5, 3)
SYNTHETIC = SyntheticSettings(parse_routing("sticky:0.5"), 0.9, 0.9)
CPU = EngineConfig(device="cpu", context=512)


def test_a_cell_runs_as_it_says(tiny: Tiny) -> None:
    with EngineBench.load(str(tiny("qwen2_moe")[0]), CPU, AMOUNT, SYNTHETIC, None) as bench:
        subject = bench.subject
        assert (subject.num_layers, subject.num_experts, subject.synthetic) == (3, 8, "")
        assert subject.draft_bytes == bench.memory["draft"] > 0 < bench.memory["slots"]
        kept = bench._engine.stream
        asked = []

        def watched(request: Any, stop: Any = None) -> Any:
            asked.append((request, bench._engine.plan.num_slots))
            return kept(request, stop)

        bench._engine.stream = watched  # type: ignore[method-assign]
        reset, resets = bench._engine.reset, []

        def watched(*, ram: bool = False) -> None:
            resets.append((len(asked), ram))
            reset(ram=ram)

        bench._engine.reset = watched  # type: ignore[method-assign]
        off = Switches(copies_beside=False, fused_draft=False)
        cells = [
            Cell("c4", "moe-speq", 3, 12),
            Cell("c4", "on-demand", 0, 9),
            Cell("c4", "single-later", 3, 9, off),
        ]
        found = [bench.measure(cell) for cell in cells]
        for (request, slots), cell in zip(asked[::2], cells, strict=True):
            assert (request.policy, request.draft_length, slots) == (
                cell.policy,
                cell.draft_length,
                cell.num_slots,
            )
            assert request.switches == replace(cell.switches, look_up=False) and request.prompt is not None
            assert (request.max_new_tokens, request.strict) == (6, True)
        assert resets == [(0, True), (2, True), (4, True)], "every cell begins with empty slots"
        assert len({figures["tokens_sha256"] for figures in found}) == 1
        assert all(figures["prompts"] == 2 and figures["new_tokens"] == 12 for figures in found)
        drafted, plain, _ = found
        assert plain["acceptance_rate"] is None and drafted["coverage_rate"] >= drafted["hit_rate"] > 0
        assert plain["steps"] == 10
        assert bench.measure(cells[0])["hit_rate"] == pytest.approx(drafted["hit_rate"], abs=0.2)
        refused = bench.measure(Cell("c4", "moe-speq", 3, 1))["refused"]
        assert "too small" in str(refused)
        assert bench.measure(cells[1])["tokens_sha256"] == plain["tokens_sha256"], (
            "it goes on after a refusal"
        )
        for length in (0, 3):
            bound = bench.measure(Cell("c4", RESIDENT, length, subject.total_experts))
            assert (bound["hit_rate"], bound["prompts"], bound["policy"]) == (1, 2, RESIDENT)
            assert bound["tokens_sha256"] == plain["tokens_sha256"]


def test_a_shape_runs_random_tokens_and_says_what_is_simulated() -> None:
    with EngineBench.load(tiny_shape("mixtral"), CPU, AMOUNT, SYNTHETIC, None) as bench:
        subject = bench.subject
        assert subject.datasets == (RANDOM_TOKENS,) and "acceptance 0.9" in subject.synthetic
        assert "synthetic routing" in subject.label and TABLES["fig6"].cells(subject) == []
        (cell,) = {c for c in TABLES["4"].cells(subject) if not str(c.switches)}
        assert cell.dataset == RANDOM_TOKENS
        figures = bench.measure(replace(cell, num_slots=10))
        assert (
            figures["prompts"] == 2
            and figures["new_tokens"] == 12
            and 0 < float(figures["hit_rate"] or 0) <= 1
        )


def test_a_model_that_cannot_be_drafted_for_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    missing = replace(CPU, draft_dir=tmp_path)
    with pytest.raises(LocalMoeError) as caught:
        EngineBench.load(str(tiny("qwen2_moe")[0]), missing, AMOUNT, SYNTHETIC, None)
    assert isinstance(caught.value, DraftError)
