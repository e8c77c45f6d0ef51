"""Prompts whose passes ask for the experts that they use, on a real GPU: the bits of passes past which all
are streamed, the same model where the CPU helps, and never more memory than the budget."""

from __future__ import annotations

import pytest
import torch
from engine.test_cuda_lanes import check_slots, device_runner, leave_slots
from support.shapes import shallow, smooth

from localmoe.core.config import EngineConfig
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import Phase
from localmoe.engine import Engine
from localmoe.experts.lane_balance import LanePass
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.prompt_ways import WINDOW
from localmoe.model.shapes import SHAPES

pytestmark = pytest.mark.gpu
CONFIG = EngineConfig(device="cuda", context=2048, draft_length=0, lanes="all")
LENGTHS = (WINDOW + 1, 300, 900)


def read(runner: DeviceRunner, tokens: int, *, asks: bool, kind: LanePass | None = None) -> torch.Tensor:
    """Logits behind a text that begins with a window and goes on with a longer pass, and of two tokens
    after it. kind: how the CPU helps; None: it does not."""
    assert runner.passes.lane is not None
    runner.passes.memory.forget()
    runner.sequence.truncate(0)
    runner.passes.lane.allowed = kind is not None
    for each, ways in runner._prompt.ways.items():
        may = asks and each is kind
        ways.asks = lambda tokens, missing, may=may: may  # type: ignore[method-assign, misc]
    text = [(7 * i + i * i) % 1000 + 10 for i in range(tokens + 20)]
    parts: list[tuple[list[int], Phase]] = [
        (text[:20], "prefill"),
        (text[20:], "prefill"),
        ([30, 40], "verify"),
    ]
    found = [runner.run(part, phase, last_only=phase == "prefill").cpu() for part, phase in parts]
    return torch.cat(found).double()


@pytest.mark.parametrize("name", list(SHAPES))
def test_of_every_shape_a_pass_that_asks_is_one_past_which_experts_are_streamed(name: str) -> None:
    routing = SyntheticSettings(parse_routing("uniform"))  # a near-tie of routers would hide all else
    with Engine.load_shape(smooth(shallow(name, 3)), CONFIG, routing) as engine:
        budget = leave_slots(engine, 20)
        runner = device_runner(engine)
        lane, synthetic = runner.passes.lane, runner.passes.synthetic
        assert lane is not None and synthetic is not None
        synthetic.begin(0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for tokens in LENGTHS:
            if tokens > runner._prompt.ways[LanePass.PROMPT].most:
                continue
            streamed = read(runner, tokens, asks=False)
            asked = read(runner, tokens, asks=True)
            assert torch.equal(streamed, asked), tokens
            for kind in lane.prompt_kinds:
                jobs = lane.counters().jobs
                helped = read(runner, tokens, asks=True, kind=kind)
                assert lane.counters().jobs > jobs and not lane.failure
                check_slots(runner.passes.memory)
                moved = (streamed - helped).norm(dim=1) / streamed.norm(dim=1)
                assert moved.median() <= 0.03, (tokens, kind, moved)
        assert torch.cuda.max_memory_reserved() <= budget
    torch.cuda.empty_cache()
