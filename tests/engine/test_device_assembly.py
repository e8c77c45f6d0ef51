"""Assembling whole passes, on what stands in for a GPU."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_model, write_model
from torch import Tensor

pytest.importorskip("triton")

from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError, UnsupportedModelError
from localmoe.engine import device_parts, planning
from localmoe.engine.budget import BudgetKeeper
from localmoe.engine.loading import assemble
from localmoe.engine.planning import prepare_model
from localmoe.engine.settings import ComputeSettings
from localmoe.model.device_runner import DeviceRunner

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


class Lane:
    """Counts how often it is closed; no pass gets as far as to use it."""

    closed, rows, link, needed = 0, 1024, True, False

    def close(self) -> None:
        self.closed += 1


@pytest.mark.interpreted
@pytest.mark.parametrize("error", [AttributeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_model_whose_first_pass_fails_is_refused_with_a_remedy_and_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "odd", tiny_model("mixtral", dtype=torch.float16, num_hidden_layers=1))
    config = EngineConfig(device="cpu", context=64, draft_length=0)
    prepared = prepare_model(str(folder), config)
    compute = ComputeSettings(torch.device("cpu"), torch.float16, whole_passes=True)
    prepared = replace(prepared, skeleton=prepared.source.skeleton(torch.float16), compute=compute)

    made: list[weakref.ref[Tensor]] = []

    def broken(self: DeviceRunner) -> None:
        held = [self.passes.memory.slots._arena, self.passes.memory.block.home]
        made.extend(weakref.ref(tensor) for tensor in [*held, *self.issue._model.parameters()])
        raise error("'NoneType' object has no attribute 'window'")

    lane = Lane()
    monkeypatch.setattr(DeviceRunner, "prepare", broken)
    monkeypatch.setattr(device_parts, "make_lane", lambda *arguments: (lane, "VRAM, PCIe and CPU"))
    told: dict[type[BaseException], tuple[type[BaseException], str]] = {
        AttributeError: (UnsupportedModelError, r"GPU kernels .*'window'.*--dtype float32"),
        torch.OutOfMemoryError: (BudgetError, "memory ran out while loading"),
        KeyboardInterrupt: (KeyboardInterrupt, "'window'"),
    }
    kind, words = told[error]
    with pytest.raises(kind, match=words) as told_error:
        assemble(prepared, config, progress=None, cancel=None)
    assert lane.closed == 1
    gc.collect()
    left = [tensor() for tensor in made]
    assert len(left) > 5 and all(tensor is None or tensor.is_meta for tensor in left)
    assert told_error.value.__traceback__ is not None, "somebody still holds the error"


@pytest.mark.interpreted
def test_passes_of_prompts_are_as_long_as_the_budget_of_now_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "tiny", tiny_model("mixtral", dtype=torch.float16))
    config = EngineConfig(device="cpu", context=64, draft_length=0, vram_budget_bytes=160 << 20)
    prepared = prepare_model(str(folder), config)
    compute = ComputeSettings(torch.device("cpu"), torch.float16, whole_passes=True)
    skeleton, plan = prepared.source.skeleton(torch.float16), replace(prepared.plan, prefill_chunk=3072)
    prepared = replace(prepared, skeleton=skeleton, compute=compute, plan=plan)
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: None)
    monkeypatch.setattr(planning, "choose_chunk", lambda footprint, budget, *rest, **more: budget >> 14)
    parts = assemble(prepared, config, progress=None, cancel=None)
    try:
        assert parts.runner.passes.prompt_rows == 3072  # type: ignore[union-attr]
        lacking: list[int] = []

        def new_slots(count: int) -> None:
            if lacking:
                raise torch.OutOfMemoryError(f"{lacking.pop()} slots in the way")

        keeper = BudgetKeeper(config, lambda: parts, lambda: 0, new_slots)
        for mebibytes in (140, 154):
            assert keeper.resize(mebibytes << 20).prefill_chunk == mebibytes << 6
            assert parts.runner.passes.prompt_rows == mebibytes << 6  # type: ignore[union-attr]
        lacking.append(3)
        with pytest.raises(BudgetError):
            keeper.resize(144 << 20)
        assert parts.runner.passes.prompt_rows == 154 << 6  # type: ignore[union-attr]
    finally:
        parts.close()


@pytest.mark.slow(but=3)
@pytest.mark.interpreted
@pytest.mark.parametrize(
    "architecture", ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "phimoe", "gpt_oss", "qwen3_next"]
)
def test_compiling_for_a_model_runs_none_of_its_kernels_and_leaves_no_trace(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "tiny", tiny_model(architecture, dtype=torch.float16))
    config = EngineConfig(device="cpu", context=160, draft_length=0)
    prepared = prepare_model(str(folder), config)
    compute = ComputeSettings(torch.device("cpu"), torch.float16, whole_passes=True)
    prepared = replace(prepared, skeleton=prepared.source.skeleton(torch.float16), compute=compute)
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.compile())
    parts = assemble(prepared, config, progress=None, cancel=None)
    try:
        assert isinstance(parts.runner, DeviceRunner)
        memory = parts.passes.memory
        assert not memory.block.log.any() and not memory.resident_keys()
        for layer in parts.runner.sequence.layers:
            if layer.keys is not None:
                assert not layer.keys.any() and not layer.values.any()
    finally:
        parts.close()
