"""A layer's experts divided between GPU and CPU lane: the same sums, whoever computes which columns."""

from __future__ import annotations

import mmap
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE, DTYPES
from test_routed_experts import (
    OAI,
    SILU,
    Bench,
    assert_close,
    bench,
    inputs,
    reference,
    routing,
    view_of,
)

from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.lane_block import LaneBlock, LaneRates
from localmoe.experts.rest_block import RestBlock
from localmoe.kernels.gpu.foretelling import foretell
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import routed_experts, split_quantum
from localmoe.kernels.lanes import FORETOLD
from localmoe.kernels.mailbox import JOB_SHIFT, LAYER_SHIFT, NOBODY
from localmoe.kernels.residency import CPU, HIT, LATE, MISS, MISS_KEPT, ON_DISK, ON_HOST, ResidencyView

ON_GPU = DEVICE.type == "cuda"
ALL_CPU = LaneRates(0.0, 0.0, 0.0, 1.0)
BOTH = LaneRates(0.0, 1.0, 0.1, 1.0)
ALL_LINK = LaneRates(1e9, 1.0, 0.0, 1.0)


class Store:
    """A bench's records, as a lane asks for them."""

    def __init__(self, made: Bench) -> None:
        self.made, self.layouts, self.num_layers = made, [made.layout], 1
        self.num_experts, self.dtype = len(made.host), made.host.dtype

    def record(self, key: tuple[int, int]) -> Tensor:
        return self.made.record(key[1])


@contextmanager
def lane_of(
    made: Bench, top_k: int, *, patience: int = 2_000_000, completing: bool = False
) -> Iterator[tuple[CpuLane, LaneBlock]]:
    lane = CpuLane(
        Store(made), made.shape.activation, [(made.gate_up_bias, made.down_bias)],  # type: ignore[arg-type]
        tokens=40, top_k=top_k, threads=2, pinned=ON_GPU,
    )  # fmt: skip
    quanta, interleaved = (
        [split_quantum(made.shape.inner, made.shape.form)],
        [made.shape.activation.interleaved],
    )
    rests = RestBlock([made.layout], interleaved, quanta, made.host.dtype, DEVICE) if completing else None
    block = LaneBlock(
        lane.mailbox, [made.shape.inner], quanta, len(made.host), DEVICE, patience, rests
    )  # fmt: skip
    lane.hold()
    try:
        yield lane, block
    finally:
        lane.close()


def run(
    made: Bench, block: LaneBlock, rates: LaneRates, x: Tensor, index: Tensor, weights: Tensor, live: int,
    view: ResidencyView, issued: int = 0,
) -> Tensor:  # fmt: skip
    count = torch.tensor([live], device=DEVICE)
    block.upload(issued, rates)
    lane = block.view(0)
    groups = group_pairs(index, count, view, lane)
    return routed_experts(
        x, groups, index, weights, count, view.done, made.shape, len(made.host),
        gate_up_bias=made.gate_up_bias, down_bias=made.down_bias, lane=lane,
    ).cpu()  # fmt: skip


def kinds(view: ResidencyView) -> list[int]:
    return (view.log.cpu() & 0xFF).tolist()


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "rates", [ALL_CPU, LaneRates(0.0, 1.0, 0.1, 1.0), ALL_LINK], ids=["cpu", "both", "link"]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_division_gives_the_same_sums(rates: LaneRates, transposed: bool, biased: bool) -> None:
    activation, dtype = (OAI, torch.float16) if biased else (SILU, DTYPES[0])
    made = bench(transposed=transposed, activation=activation, biased=biased, dtype=dtype)
    made.put(1, 3)
    x, (index, weights) = inputs(6, dtype), routing(6, 3, 5)
    index[0, 0] = -1  # nobody's
    tickets, found = [ON_HOST, 0, ON_HOST, ON_HOST, ON_HOST], set()
    with lane_of(made, 3) as (lane, block):
        for live in (5, 1, 0):
            view = view_of(made.row(tickets, {1: 3}, [], 0))
            out = run(made, block, rates, x, index, weights, live, view)
            assert_close(out, reference(made, x, index, weights, live), live)
            found |= set(kinds(view))
        report = block.read(block.numbers().cpu().numpy())
        jobs = 0 if rates is ALL_LINK else 2
        assert not report.failed and report.posted == lane.counters().jobs == jobs
    wanted = {"cpu": {CPU}, "both": {CPU, MISS}, "link": {MISS}}
    name = {ALL_CPU: "cpu", BOTH: "both", ALL_LINK: "link"}[rates]
    assert found == {0, HIT} | wanted[name]


@pytest.mark.skipif(
    ON_GPU or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="needs memory at a low address, which is not pinned",
)
def test_the_mailbox_may_lie_at_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes a number below 2^31 for 32 bits, also if it is an address."""
    zeros, below_2_gib = torch.zeros, 0x40

    def low(*shape: Any, **options: Any) -> Tensor:
        if options.get("dtype") != torch.uint8:
            return zeros(*shape, **options)
        memory = mmap.mmap(-1, *shape, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | below_2_gib)
        return torch.frombuffer(memory, dtype=options["dtype"])

    made = bench()
    made.put(1, 3)
    x, (index, weights) = inputs(6), routing(6, 3, 5)
    monkeypatch.setattr(torch, "zeros", low)
    with lane_of(made, 3) as (lane, block):
        monkeypatch.undo()
        assert 0 < lane.mailbox.address < 1 << 31
        view = view_of(made.row([ON_HOST, 0, ON_HOST, ON_HOST, ON_HOST], {1: 3}, [], 0))
        out = run(made, block, BOTH, x, index, weights, 5, view)
        assert_close(out, reference(made, x, index, weights, 5), 5)
        assert {CPU, MISS} <= set(kinds(view))
        lane.rest()
        block.restart(7)
        foretell(index[:1], weights[:1], view, 0, lane=block.view(0))
        assert _foretold(lane) >> JOB_SHIFT == 7


def test_an_expert_is_split_where_both_lanes_end_together() -> None:
    made = bench(experts=1)
    quantum, inner = split_quantum(made.shape.inner, made.shape.form), made.shape.inner
    x, index, weights = (
        inputs(2),
        torch.zeros(2, 1, dtype=torch.int64, device=DEVICE),
        torch.ones(2, 1, device=DEVICE),
    )
    with lane_of(made, 1) as (_, block):
        for share in range(0, inner + 1, quantum):
            part = share / inner  # of one expert: part * first = (1 - part) * link
            rates = LaneRates(0.0, 1.0 - part, 0.0, part or 1e-6)
            view = view_of(made.row([ON_HOST], {}, [0], 0))
            out = run(made, block, rates, x, index, weights, 2, view)
            assert_close(out, reference(made, x, index, weights, 2), 2)
            kind = {0: MISS_KEPT, inner: CPU}.get(share, MISS | share << 8)
            assert view.log.tolist() == [kind]
            assert int(block.view(0).share) == share


def divided(
    counts: list[int], first_of_equals: int, rates: LaneRates, inner: int, quantum: int,
    alone: tuple[int, ...] = (),
) -> list[int]:  # fmt: skip
    """Columns of each expert that the CPU computes, when all are missing, and it has some `alone`: by a plain
    loop."""
    experts = [e for e, count in enumerate(counts) if count]
    order = sorted(set(experts) - set(alone), key=lambda e: (counts[e], (e - first_of_equals) % len(counts)))
    shares, spent = [0] * len(counts), rates.handover_us
    for e in set(experts) & set(alone):
        shares[e] = inner
        spent += rates.first_us + rates.further_us * (counts[e] - 1)
    for place, e in enumerate(order):
        cost = rates.first_us + rates.further_us * (counts[e] - 1)
        part = ((len(order) - place) * rates.link_us - spent) / (cost + rates.link_us)
        shares[e] = min(int(min(max(part, 0.0), 1.0) * inner / quantum + 0.5) * quantum, inner)
        spent += cost
    return shares


def test_the_cpu_gets_the_foretold_expert_first_and_else_another_one_each_time() -> None:
    made, generator = bench(experts=6), np.random.default_rng(0)
    rates, named, first = LaneRates(0.0, 1.0, 0.0, 1.0), set(), set()
    with lane_of(made, 3) as (lane, block):
        lane.rest()
        view_lane = block.view(0)
        for job in range(60):
            tickets = np.where(generator.random(6) < 0.6, ON_HOST, 0).tolist()
            view = view_of(made.row(tickets, {e: 0 for e in range(6) if tickets[e] == 0}, [], 0))
            index = torch.tensor(generator.permutation(7)[None, :3], device=DEVICE)  # 6 is nobody's
            weights = torch.tensor(generator.random((1, 3)), device=DEVICE, dtype=DTYPES[0])
            block.restart(job)
            of_this_layer = job % 3 > 0
            foretell(index, weights, view, 0 if of_this_layer else 5, lane=view_lane)
            word = _foretold(lane)
            assert word >> JOB_SHIFT == job and (word >> LAYER_SHIFT) & NOBODY == (0 if of_this_layer else 5)
            named.add(word & NOBODY)
            by_weight = sorted(zip(weights[0].tolist(), index[0].tolist(), strict=True), reverse=True)
            missing = [e for _, e in by_weight if e < 6 and tickets[e] == ON_HOST]
            assert word & NOBODY == (missing[0] if missing else NOBODY)
            block.upload(0, rates)
            group_pairs(index, torch.tensor([1], device=DEVICE), view, view_lane)
            shares = view_lane.share.tolist()
            assert int(view_lane.words[FORETOLD]) == -1, "it counts once"
            if missing:
                turn = missing[0] if of_this_layer else job * 7
                chosen = min(missing, key=lambda e: (e - turn) % 6)
                assert shares[chosen] == max(shares) > 0
                first.add(chosen)
        block.restart(0)
    assert named == {*range(6), NOBODY} and first == set(range(6))


def _foretold(lane: CpuLane) -> int:
    if ON_GPU:
        torch.cuda.synchronize()
    return int(lane.mailbox.foretold[0])


def test_the_cpu_takes_experts_of_few_tokens_until_both_lanes_end_together() -> None:
    made, rates = bench(experts=6), LaneRates(0.25, 1.0, 0.5, 2.0)
    quantum, inner, seen = split_quantum(made.shape.inner, made.shape.form), made.shape.inner, set()
    generator = torch.Generator().manual_seed(0)
    with lane_of(made, 2) as (_, block):
        for tokens in (1, 3, 9, 20, 40):
            chances = torch.rand(tokens, 6, generator=generator) * torch.tensor([1, 1, 1, 1.5, 2, 3])
            index = chances.topk(2).indices
            counts = torch.bincount(index.flatten(), minlength=6).tolist()
            posted = int(block.words[0])
            weights = torch.full((tokens, 2), 0.5, device=DEVICE)
            view = view_of(made.row([ON_HOST] * 6, {}, [], 0))
            run(made, block, rates, inputs(tokens), index.to(DEVICE), weights, tokens, view)
            wanted = divided(counts, posted * 7 % 6, rates, inner, quantum)
            assert block.view(0).share.tolist() == wanted
            seen |= {(share > 0) + (share == inner) for share in wanted}
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("tokens", [1, 8])
def test_what_the_link_does_not_reach_is_the_cpus_and_the_rest_ends_with_it(tokens: int) -> None:
    made, rates = bench(experts=8), LaneRates(0.25, 1.0, 0.5, 2.0)
    made.put(7, 3)
    quantum, inner, seen = split_quantum(made.shape.inner, made.shape.form), made.shape.inner, set()
    generator = torch.Generator().manual_seed(tokens)
    x = inputs(tokens)
    with lane_of(made, 4) as (_, block):
        for alone in ((0, 2, 4), (1,), tuple(range(7))):
            tickets = [ON_DISK if e in alone else ON_HOST for e in range(7)] + [0]
            index = torch.rand(tokens, 7, generator=generator).argsort(dim=1)[:, :4]
            counts = torch.bincount(index.flatten(), minlength=8).tolist()
            weights = torch.full((tokens, 4), 0.25, device=DEVICE)
            row = made.row([ON_HOST] * 7 + [0], {7: 3}, [2], 0)
            view = view_of(replace(row, ticket=tickets))
            for e in alone:
                view.address[e] = 0  # nobody reads it
            posted = int(block.words[0])
            out = run(made, block, rates, x, index.to(DEVICE), weights, tokens, view)
            assert_close(out, reference(made, x, index.to(DEVICE), weights, tokens), tokens)
            wanted = divided(counts, posted * 7 % 8, rates, inner, quantum, alone)
            assert block.view(0).share.tolist() == wanted
            for e, kind in enumerate(kinds(view)):
                assert kind == CPU if e in alone and counts[e] else kind in (0, CPU, MISS, MISS_KEPT)
            seen |= {(share > 0) + (share == inner) for e, share in enumerate(wanted) if e not in alone}
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("tokens", [11, 40])
def test_many_missing_experts_are_divided_as_few_are(tokens: int) -> None:
    made, rates = bench(experts=80), LaneRates(3.0, 1.0, 0.25, 2.0)
    index = torch.rand(tokens, 80, generator=torch.Generator().manual_seed(tokens)).argsort(dim=1)[:, :6]
    counts = torch.bincount(index.flatten(), minlength=80).tolist()
    assert sum(count > 0 for count in counts) > 40, "more than are compared at a time"
    view, live = view_of(made.row([ON_HOST] * 80, {}, [], 0)), torch.tensor([tokens], device=DEVICE)
    with lane_of(made, 6) as (_, block):
        block.restart(5)
        block.upload(0, rates)
        group_pairs(index.to(DEVICE), live, view, block.view(0))
        quantum, inner = split_quantum(made.shape.inner, made.shape.form), made.shape.inner
        assert block.view(0).share.tolist() == divided(counts, 35, rates, inner, quantum)


def test_copies_under_way_leave_more_to_the_cpu() -> None:
    made = bench(experts=5)
    x, (index, weights) = inputs(4), routing(4, 4, 5)
    with lane_of(made, 4) as (_, block):
        shares = []
        for issued in (3, 5, 9):  # the last complete copy is number 3
            view = view_of(made.row([ON_HOST] * 5, {}, [], 3))
            out = run(made, block, LaneRates(0.0, 1.0, 0.0, 1.0), x, index, weights, 4, view, issued)
            assert_close(out, reference(made, x, index, weights, 4), 4)
            shares.append(int(block.view(0).share.sum()))
    assert shares[0] < shares[1] < shares[2] == 5 * made.shape.inner


def test_the_order_begins_elsewhere_each_time() -> None:
    made = bench(experts=5)
    x, index, weights = inputs(1), torch.arange(5, device=DEVICE)[None], torch.ones(1, 5, device=DEVICE)
    whole = set()
    with lane_of(made, 5) as (_, block):
        for _ in range(5):
            view = view_of(made.row([ON_HOST] * 5, {}, [], 0))
            run(made, block, LaneRates(0.0, 1.0, 0.0, 1.0), x, index, weights, 1, view)
            whole |= {e for e, kind in enumerate(kinds(view)) if kind == CPU}
    assert whole == set(range(5))


def test_late_copies_are_waited_for_beside_the_cpu() -> None:
    made = bench(experts=4)
    made.put(2, 1)
    x, (index, weights) = inputs(4), routing(4, 3, 4)
    with lane_of(made, 3) as (_, block):
        view = view_of(made.row([ON_HOST, ON_HOST, 1, ON_HOST], {2: 1}, [], 1))
        out = run(made, block, ALL_CPU, x, index, weights, 4, view, issued=1)
        assert_close(out, reference(made, x, index, weights, 4), 4)
        assert kinds(view)[2] in (HIT, LATE) and kinds(view).count(CPU) == 3


@pytest.mark.parametrize("how", ["closed", "late"])
def test_a_lane_that_does_not_answer_is_noted_and_asked_no_more(how: str) -> None:
    made = bench(experts=3)
    x, (index, weights) = inputs(2), routing(2, 2, 3)
    with lane_of(made, 2, patience=50) as (lane, block):
        if how == "closed":
            lane.close()
        else:
            lane._arguments[0][:] = np.iinfo(np.int64).max  # threads see a STOP and leave
        for expected in (True, True):
            view = view_of(made.row([ON_HOST] * 3, {}, [], 0))
            run(made, block, ALL_CPU, x, index, weights, 2, view)
            report = block.read(block.numbers().cpu().numpy())
            assert report.failed is expected and report.posted == 1
        assert set(kinds(view)) <= {0, MISS}  # the second time all came over the link
        assert_close(
            run(made, block, ALL_CPU, x, index, weights, 2, view), reference(made, x, index, weights, 2), 2
        )
