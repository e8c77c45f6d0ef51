"""What a real model's shape does not fit is refused in seconds, from headers alone, with what would fit."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.sparse_files import tensor_shapes, write_zeros

from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError
from localmoe.engine import Engine, plan_model, planning
from localmoe.hardware.probe import probe_hardware
from localmoe.model.shapes import SHAPES

GIB = 1 << 30
LIMIT_S = 5.0  # of two that are promised: test machines are busy
SHAPE_NAMES = ("mixtral-8x7b", "phi-3.5-moe", "qwen3-30b-a3b")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs files with holes")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders of real sizes without data, by shape."""
    made = {}
    for name in SHAPE_NAMES:
        config = SHAPES[name].config()
        config.dtype = torch.bfloat16
        made[name] = tmp_path_factory.mktemp("shape") / name
        config.save_pretrained(made[name])
        write_zeros(made[name] / "model.safetensors", tensor_shapes(config, fused=False))
    return made


def with_ram(patch: pytest.MonkeyPatch, available: int) -> None:
    """Make the planner believe in that much RAM."""
    machine = replace(
        probe_hardware(measure=False), ram_total_bytes=1024 * GIB, ram_available_bytes=available
    )
    patch.setattr(planning, "probe_hardware", lambda measure: machine)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("budget", [8, 12, 16, 24])
@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_a_model_beyond_the_ram_is_refused_within_seconds_and_one_within_it_is_planned_as_fast(
    shape: str, budget: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(device="cpu", dtype="bfloat16", vram_budget_bytes=budget * GIB, context=4096)
    with_ram(monkeypatch, 40 * GIB)
    reports: list[object] = []
    start = time.perf_counter()
    with pytest.raises(
        BudgetError,
        match=r"40\.0 GiB available .* may be used .* take at most \d+MiB, or keep them on the disk",
    ):
        Engine.load(str(folders[shape]), config, progress=reports.append)
    assert time.perf_counter() - start < LIMIT_S
    assert not reports
    with_ram(monkeypatch, 400 * GIB)
    start = time.perf_counter()
    footprint, plan = plan_model(str(folders[shape]), config)
    assert time.perf_counter() - start < LIMIT_S
    assert plan.total_bytes <= budget * GIB
    assert 0 < plan.num_slots < footprint.total_experts
    assert plan.drafting or "would do" in plan.drafting_reason


def test_a_draft_that_a_small_budget_cannot_hold_is_refused_within_seconds(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ram(monkeypatch, 400 * GIB)
    config = EngineConfig(device="cpu", dtype="bfloat16", vram_budget_bytes=8 * GIB, draft_length=4)
    start = time.perf_counter()
    with pytest.raises(BudgetError, match=r"the low-bit draft .* give a budget of at least \d+MiB"):
        Engine.load(str(folders["mixtral-8x7b"]), config)
    assert time.perf_counter() - start < LIMIT_S
