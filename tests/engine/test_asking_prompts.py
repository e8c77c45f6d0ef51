"""Prompts whose passes ask for the experts that they use, in Triton's interpreter: the bits of passes past
which all are streamed, with the CPU nearly so, and the same text behind them, also where the CPU fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_completed_experts import with_lane
from engine.test_rehearsal import PLAIN, prepared_for_kernels
from torch import Tensor

pytest.importorskip("triton")

from localmoe.engine.loading import EngineParts, assemble
from localmoe.experts.cpu_lane import CpuLane
from localmoe.kernels.cpu import control
from localmoe.kernels.lanes import FAILED
from localmoe.model import device_prompt_passes
from localmoe.model.device_runner import DeviceRunner

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
BEFORE, PROMPT, LONGEST_WINDOW = 5, 19, 8  # tokens
TWO_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}
TEXT = [(7 * i + i * i) % 250 for i in range(BEFORE + PROMPT)]


@contextmanager
def streamed_once(
    folder: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[EngineParts, DeviceRunner, list[Tensor]]]:
    """What is assembled, and what it reads where all experts are streamed."""
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.choice.prepare(torch.zeros(1, 256)))
    monkeypatch.setattr(device_prompt_passes, "WINDOW", LONGEST_WINDOW)
    kinds = TWO_LAYERS.get(architecture, {})
    prepared = prepared_for_kernels(folder, architecture, num_hidden_layers=2, **kinds)
    parts = assemble(prepared, PLAIN, progress=None, cancel=None)
    try:
        assert isinstance(parts.runner, DeviceRunner)
        yield parts, parts.runner, read(parts.runner, asks=False)
    finally:
        parts.close()


def read(runner: DeviceRunner, *, asks: bool) -> list[Tensor]:
    """Logits behind a text that begins with a window, behind the longer pass that follows, and of two tokens
    after it."""
    runner.passes.memory.forget()
    runner.sequence.truncate(0)
    for ways in runner._prompt.ways.values():
        ways.asks = lambda tokens, missing: asks  # type: ignore[method-assign]
    first = runner.run(TEXT[:BEFORE], "prefill", last_only=True).clone()
    runner.passes.memory.forget()  # all are missing
    second = runner.run(TEXT[BEFORE:], "prefill", last_only=True).clone()
    return [first, second, runner.run([3, 4], "verify", last_only=False).clone()]


@pytest.mark.slow(but=1)
@pytest.mark.interpreted
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "qwen3_next", "qwen3_moe"])
def test_a_pass_that_asks_has_the_bits_of_one_past_which_experts_are_streamed(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed_once(tmp_path, architecture, monkeypatch) as (_, runner, streamed):
        asked = read(runner, asks=True)
        for one, other in zip(streamed, asked, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_with_the_cpu_it_is_nearly_the_same_and_every_slot_is_whole(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed_once(tmp_path, architecture, monkeypatch) as (parts, runner, streamed):
        memory = runner.passes.memory
        with with_lane(parts, tokens=PROMPT + 3) as lane:
            asked = read(runner, asks=True)
            assert lane.counters().jobs > 0 and not lane.failure
            for key in memory.resident_keys():
                record = memory.store.record(key)
                slot = memory.slots._arena[int(memory._slot_of[key]), : record.numel()]
                assert torch.equal(slot, record), key
        for one, other in zip(streamed, asked, strict=True):
            assert (one - other).norm() < 2e-2 * one.norm()


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_next"])
def test_a_cpu_that_does_not_answer_costs_time_and_no_bits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where layers keep a state or a ring, too: the pass is run again from where it began."""
    with streamed_once(tmp_path, architecture, monkeypatch) as (parts, runner, streamed):
        with with_lane(parts, tokens=PROMPT) as lane:
            lane.block._views = [replace(view, patience=5) for view in lane.block._views]
            lane.lane._control[control.STOP] = 1
            for thread in lane.lane._threads:
                thread.join()
            monkeypatch.setattr(CpuLane, "healthy", True)  # nobody has noticed yet
            lane.allowed = False  # the windows before and behind
            ask = runner._prompt._ask

            def asked_with_the_lane(*given: Any) -> Tensor | None:
                lane.allowed = True
                try:
                    return ask(*given)
                finally:
                    lane.allowed = False

            monkeypatch.setattr(runner._prompt, "_ask", asked_with_the_lane)
            asked = read(runner, asks=True)
            assert "did not answer" in lane.failure
            told = [ways._asked for ways in runner._prompt.ways.values()]
            assert not any(told), "what a pass took that failed is told to nobody"
        for one, other in zip(streamed, asked, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("architecture", ["qwen3_next", "gpt_oss", "qwen3_moe"])
def test_a_pass_whose_answer_came_late_is_run_again_from_where_it_began(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where experts come by the CPU alone; layers may keep a state or a ring."""
    with streamed_once(tmp_path, architecture, monkeypatch) as (parts, runner, streamed):
        with with_lane(parts, tokens=PROMPT) as lane:
            lane.needed = True
            passes, late, numbers = [0], [0], lane.block.numbers

            def every_other_one_fails() -> Tensor:
                passes[0] += 1
                if passes[0] % 2:
                    late[0] += 1
                    lane.block.words[FAILED] = 1
                return numbers()

            monkeypatch.setattr(lane.block, "numbers", every_other_one_fails)
            asked = read(runner, asks=True)
            assert late[0] >= 3 and passes[0] >= 2 * late[0] and not lane.failure
        for one, other in zip(streamed, asked, strict=True):
            assert (one - other).norm() < 2e-2 * one.norm()
