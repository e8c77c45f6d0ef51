"""What a layer says that it waited for: by a clock that tells off programs, and on a GPU by its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from dense_cases import DEVICE
from test_lanes import ALL_CPU, lane_of, run
from test_routed_experts import Bench, bench, inputs, routing, view_of

from localmoe.experts.records import RecordLayout
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.hardware.cuda import read_ns
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu import routed_kernels, waiting
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import ExpertShape, routed_experts
from localmoe.kernels.residency import CLOCK_WORDS, ON_HOST, WAITED_NS, ResidencyView

TICK, EXPERT_NS = 1000, 100
told_off = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has a clock of its own")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by TICK whenever somebody looks at it."""
    ticks = itertools.count(1000, TICK)
    monkeypatch.setattr(waiting, "now", lambda: tl.full([], next(ticks), tl.int64))


def clocked(view: ResidencyView) -> ResidencyView:
    clock = torch.full((CLOCK_WORDS,), 77, dtype=torch.int64, device=DEVICE)
    return replace(view, clock=clock, expert_ns=EXPERT_NS)


def waited_ns(
    made: Bench, tickets: list[int], slots: dict[int, int], done: int = 9, token_experts: int = 3
) -> int:
    """Of a layer of one token that asks for the first experts."""
    for expert, slot in slots.items():
        made.put(expert, slot)
    x, (index, weights) = inputs(1), routing(1, token_experts, token_experts)
    view = clocked(view_of(made.row(tickets, slots, [], done)))
    live = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    groups = group_pairs(index, live, view)
    routed_experts(x, groups, index, weights, live, view.done, made.shape, len(tickets))
    assert view.clock is not None
    return int(view.clock[WAITED_NS])


@told_off
def test_a_layer_waited_as_long_as_it_took_longer_than_from_vram(
    ticking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, here = bench(experts=3, slots=4), {0: 1, 1: 2, 2: 3}
    # nobody would end a copy here
    monkeypatch.setattr(routed_kernels, "wait_for_copy", lambda done, ticket: None)
    assert waited_ns(made, [0, 3, 0], here) == 0, "all are in slots"
    assert waited_ns(made, [0, 0, ON_HOST], {0: 1, 1: 2}, token_experts=2) == 0, "nobody asks for the third"
    for tickets, slots in (([0, ON_HOST, 0], {0: 1, 2: 3}), ([ON_HOST] * 3, {}), ([0, 10, 0], here)):
        assert waited_ns(made, tickets, slots) == TICK - 3 * EXPERT_NS
    assert waited_ns(made, [ON_HOST] * 3, {}, token_experts=1) == TICK - EXPERT_NS


@told_off
def test_the_cpus_answer_is_waited_for(ticking: None) -> None:
    made = bench(experts=3)
    x, (index, weights) = inputs(2), routing(2, 2, 3)
    with lane_of(made, 2) as (_, block):
        for tickets, waited in (([ON_HOST] * 3, TICK), ([0, 0, 0], 0)):
            slots = {e: e for e in range(3) if tickets[e] == 0}
            for expert, slot in slots.items():
                made.put(expert, slot)
            view = clocked(view_of(made.row(tickets, slots, [], 0)))
            run(made, block, ALL_CPU, x, index, weights, 2, view)
            assert view.clock is not None and int(view.clock[WAITED_NS]) == waited


def test_where_nobody_measures_nothing_was_waited_for() -> None:
    block = ResidencyBlock(3, 5, DEVICE)
    assert block.clocks is None and block.view(1).clock is None
    assert block.waited_ns().tolist() == [0, 0, 0] and block.waited_ns().dtype == torch.int32
    measuring = ResidencyBlock(3, 5, DEVICE, [7, 8, 9])
    assert measuring.clocks is not None and measuring.view(1).expert_ns == 8
    measuring.clocks[1, WAITED_NS], measuring.clocks[2, WAITED_NS] = 2_000, 1 << 40
    assert measuring.waited_ns().tolist() == [0, 2_000, 2**31 - 1]


@pytest.mark.gpu
def test_a_gpu_waits_as_long_as_the_link_takes() -> None:
    hidden, inner, experts = 2048, 1408, 8
    layout = RecordLayout((2 * inner, hidden), (hidden, inner), False)
    host = torch.randn(experts, layout.elements, dtype=torch.bfloat16).mul_(0.02).pin_memory()
    arena = torch.empty(experts, layout.elements, dtype=torch.bfloat16, device=DEVICE)
    made = Bench(ExpertShape(hidden, inner, False, Activation("silu")), layout, host, arena, None, None)
    x = torch.randn(1, hidden, dtype=torch.bfloat16, device=DEVICE)
    index, weights = routing(1, experts, experts)
    live = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    slots = {e: e for e in range(experts)}
    for expert, slot in slots.items():
        made.put(expert, slot)

    def measured(missing: int) -> tuple[float, int]:
        """(nanoseconds of the layer by events, nanoseconds that it waited by its own account)."""
        tickets = [ON_HOST] * missing + [0] * (experts - missing)
        held = {e: slot for e, slot in slots.items() if tickets[e] == 0}
        view = replace(
            clocked(view_of(made.row(tickets, held, [], 0))), expert_ns=read_ns(DEVICE, host[0].nbytes)
        )
        view = replace(view, score=torch.full_like(view.score, torch.inf))  # nobody makes room

        def layer() -> None:
            groups = group_pairs(index, live, view)
            routed_experts(x, groups, index, weights, live, view.done, made.shape, experts)

        layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer()
        found = []
        for _ in range(20):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            assert view.clock is not None
            found.append((began.elapsed_time(ended) * 1e6, int(view.clock[WAITED_NS])))
        return min(found)

    resident, waited = measured(0)
    assert waited == 0
    for missing in (1, experts):
        took, waited = measured(missing)
        assert waited <= took
        assert waited == pytest.approx(took - resident, rel=0.1, abs=25_000), (missing, took, resident)
