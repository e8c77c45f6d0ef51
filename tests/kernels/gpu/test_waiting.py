"""What a layer says that it waited for: by a clock that tells off programs, and on a GPU by its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton.language as tl

pytest.importorskip("triton")

from dense_cases import DEVICE
from test_lanes import ALL_CPU, lane_of, run
from test_routed_experts import Bench, bench, inputs, routing, view_of

from localmoe.experts.residency_block import ResidencyBlock
from localmoe.kernels.gpu import routed_kernels, waiting
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import (
    ExpertShape,
    down_launch,
    gate_up_launch,
    routed_experts,
)
from localmoe.kernels.residency import CLOCK_WORDS, ON_HOST, WAITED_NS, ResidencyView

TICK = 10
told_off = pytest.mark.skipif(DEVICE.type == "cuda", reason="programs run at the same time")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by TICK whenever somebody looks at it."""
    ticks = itertools.count(1000, TICK)

    def now() -> tl.tensor:
        return tl.full([], next(ticks), tl.int64)

    monkeypatch.setattr(waiting, "now", now)
    monkeypatch.setattr(routed_kernels, "now", now)


def clocked(view: ResidencyView) -> ResidencyView:
    return replace(view, clock=torch.full((CLOCK_WORDS,), 77, dtype=torch.int64, device=DEVICE))


def waited_ns(made: Bench, tickets: list[int], slots: dict[int, int], done: int = 9) -> int:
    """Of a layer of one token that asks for all experts."""
    experts = len(tickets)
    for expert, slot in slots.items():
        made.put(expert, slot)
    x, (index, weights) = inputs(1), routing(1, experts, experts)
    view = clocked(view_of(made.row(tickets, slots, [], done)))
    live = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    groups = group_pairs(index, live, view)
    routed_experts(x, groups, index, weights, live, view.done, made.shape, experts)
    assert view.clock is not None
    return int(view.clock[WAITED_NS])


def programs(shape: ExpertShape) -> tuple[int, int]:
    """Of one expert: of gate_up, of down."""
    blocks = gate_up_launch(shape, 1).block_n, down_launch(shape, 1).block_n
    return -(-shape.inner // blocks[0]), -(-shape.hidden // blocks[1])


@told_off
def test_a_layer_waited_for_what_ended_after_the_last_expert_in_a_slot(ticking: None) -> None:
    made = bench(experts=3, slots=4)
    gate_up, down = programs(made.shape)
    here = {0: 1, 1: 2, 2: 3}
    assert waited_ns(made, [0, 3, 0], here) == 0, "all are in slots"
    assert waited_ns(made, [0, ON_HOST, 0], {0: 1, 2: 3}) == 0, "its programs come first here, and end first"
    assert waited_ns(made, [ON_HOST] * 3, {}) == 3 * (gate_up + down) * TICK
    # a copy that is complete is as good as none
    assert waited_ns(made, [0, 9, 0], here, done=9) == 0


@told_off
def test_a_copy_under_way_is_waited_for_in_gate_up_alone(
    ticking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(experts=2, slots=3)
    monkeypatch.setattr(
        routed_kernels, "wait_for_copy", lambda done, ticket: None
    )  # nobody would end it here
    assert waited_ns(made, [0, 10], {0: 1, 1: 2}, done=9) == programs(made.shape)[0] * TICK


@told_off
def test_the_cpus_answer_counts_and_a_lane_without_work_does_not(ticking: None) -> None:
    made = bench(experts=3)
    x, (index, weights) = inputs(2), routing(2, 2, 3)
    with lane_of(made, 2) as (_, block):
        for tickets, least in (([ON_HOST] * 3, TICK), ([0, 0, 0], 0)):
            slots = {e: e for e in range(3) if tickets[e] == 0}
            for expert, slot in slots.items():
                made.put(expert, slot)
            view = clocked(view_of(made.row(tickets, slots, [], 0)))
            run(made, block, ALL_CPU, x, index, weights, 2, view)
            assert view.clock is not None and int(view.clock[WAITED_NS]) == least


def test_nobody_measures_on_a_cpu_and_then_nothing_was_waited_for() -> None:
    block = ResidencyBlock(3, 5, torch.device("cpu"))
    assert block.clocks is None and block.view(1).clock is None
    assert block.waited_ns().tolist() == [0, 0, 0] and block.waited_ns().dtype == torch.int32


@pytest.mark.gpu
def test_a_gpu_waits_as_long_as_the_link_takes() -> None:
    hidden, inner, experts = 2048, 1408, 8
    from localmoe.experts.records import RecordLayout
    from localmoe.kernels.activations import Activation

    layout = RecordLayout((2 * inner, hidden), (hidden, inner), False)
    host = torch.randn(experts, layout.elements, dtype=torch.bfloat16).mul_(0.02).pin_memory()
    arena = torch.empty(experts, layout.elements, dtype=torch.bfloat16, device=DEVICE)
    made = Bench(ExpertShape(hidden, inner, False, Activation("silu")), layout, host, arena, None, None)
    x = torch.randn(1, hidden, dtype=torch.bfloat16, device=DEVICE)
    index, weights = routing(1, experts, experts)
    live = torch.tensor([1], dtype=torch.int32, device=DEVICE)

    def layer(view: ResidencyView) -> tuple[float, int]:
        """(nanoseconds by events, by the layer's own clock)."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        groups = group_pairs(index, live, view)
        routed_experts(x, groups, index, weights, live, view.done, made.shape, experts)
        ended.record()
        ended.synchronize()
        assert view.clock is not None
        return began.elapsed_time(ended) * 1e6, int(view.clock[WAITED_NS])

    slots = {e: e for e in range(experts)}
    for expert, slot in slots.items():
        made.put(expert, slot)

    def measured(tickets: list[int]) -> tuple[float, int]:
        held = {e: slot for e, slot in slots.items() if tickets[e] == 0}
        return min(layer(clocked(view_of(made.row(tickets, held, [], 0)))) for _ in range(10))

    resident, waited = measured([0] * experts)
    assert waited == 0
    for missing in (1, experts):
        took, waited = measured([ON_HOST] * missing + [0] * (experts - missing))
        assert waited <= took
        # what it took longer, but for the programs that ran beside it
        assert waited == pytest.approx(took - resident, rel=0.2, abs=20_000), (missing, took, resident)
