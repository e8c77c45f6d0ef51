"""Experts that the CPU computed a part of come into slots whole: bit by bit, in every form of a record."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE, DTYPES
from test_lanes import lane_of
from test_lanes import run as run_weighted
from test_mxfp4_experts import OAI as ENDLESS_OAI
from test_mxfp4_experts import Both
from test_mxfp4_lanes import lane_of as mxfp4_lane_of
from test_routed_experts import OAI, SILU, Bench, assert_close, bench, inputs, reference, view_of

from localmoe.experts.lane_block import LaneBlock, LaneRates
from localmoe.experts.rest_block import rest_pieces
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.copy_rest import copy_rest
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import split_quantum
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.residency import CPU, HIT, MISS, MISS_KEPT, MISS_REPLACED, ON_HOST, ResidencyView
from localmoe.kernels.rests import COLUMNS, COPIED, PLANNED, RestView
from localmoe.kernels.weight_forms import WeightForm

LONG = 1e9  # of the link, that a rest may take


def rest_of(lane: LaneView) -> RestView:
    assert lane.rest is not None
    return lane.rest


def run(
    made: Bench, block: LaneBlock, rates: LaneRates, x: Tensor, index: Tensor, view: ResidencyView
) -> Tensor:
    """All experts weigh one."""
    weights = torch.ones(index.shape, device=DEVICE)
    return run_weighted(made, block, rates, x, index, weights, len(x), view)


def splitting(share: float, rest_us: float = LONG) -> LaneRates:
    """Rates by which the CPU gets this share of an expert that alone is missing."""
    return LaneRates(0.0, 1.0 - share or 1e-6, 0.0, share, rest_us)


def missing(experts: int) -> Tensor:
    return torch.arange(experts, device=DEVICE)[None]


@pytest.mark.parametrize("activation", [SILU, OAI], ids=["separate", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(but=1)
def test_a_split_expert_is_whole_once_its_rest_is_copied(
    dtype: torch.dtype, transposed: bool, activation: Activation
) -> None:
    made = bench(experts=1, transposed=transposed, activation=activation, dtype=dtype)
    quantum, inner = split_quantum(made.shape.inner, made.shape.form), made.shape.inner
    x, weights = inputs(1, dtype), torch.ones(1, 1, device=DEVICE)
    with lane_of(made, 1, completing=True) as (_, block):
        rest = rest_of(block.view(0))
        for share in range(quantum, inner, quantum):
            made.arena.fill_(torch.nan)
            view = view_of(made.row([ON_HOST], {}, [2], 0))
            out = run(made, block, splitting(share / inner), x, missing(1), view)
            assert_close(out, reference(made, x, missing(1), weights, 1), 1)
            assert int(block.view(0).share) == share and int(rest.job[COLUMNS]) == share
            assert view.log.tolist() == [MISS_KEPT] and view.ticket.tolist() == [0]
            assert view.address.tolist() == [made.slot(2)]
            record = made.record(0).cpu()
            assert not torch.equal(made.held(2)[: len(record)], record), "a part is missing still"
            copy_rest(rest)
            assert torch.equal(made.held(2)[: len(record)], record)
            assert made.held(2)[len(record) :].isnan().all(), "and nothing behind it is written"
            assert int(rest.words[COPIED]) == int(rest.words[PLANNED])
    assert int(rest.words[COPIED]) == sum(range(quantum, inner, quantum)) * 3 * made.shape.hidden // 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.slow(but=1)
def test_of_a_window_one_expert_is_completed_and_those_that_the_link_reads_stay(transposed: bool) -> None:
    """Of some experts more tokens than a tile has rows: what is read twice is read from the slot."""
    made = bench(experts=6, slots=6, transposed=transposed)
    tokens, rates = 40, LaneRates(0.1, 1.0, 0.05, 1.0, LONG)
    chances = torch.rand(tokens, 6, generator=torch.Generator().manual_seed(2))
    index = (chances * torch.tensor([1, 1, 1, 1.5, 2, 3])).topk(2).indices.to(DEVICE)
    x, weights = inputs(tokens), torch.ones(tokens, 2, device=DEVICE)
    with lane_of(made, 2, completing=True) as (_, block):
        rest = rest_of(block.view(0))
        view = view_of(made.row([ON_HOST] * 6, {}, [5, 1, 2, 3], 0))
        out = run(made, block, rates, x, index, view)
        assert_close(out, reference(made, x, index, weights, tokens), tokens)
        shares, inner = block.view(0).share.tolist(), made.shape.inner
        assert sum(0 < share < inner for share in shares) == 1 and {0, inner} < set(shares)
        copy_rest(rest)
        slots = {made.slot(slot): slot for slot in range(6)}
        for expert, (address, share) in enumerate(zip(view.address.tolist(), shares, strict=True)):
            assert (address in slots) == (share < inner)
            if address in slots:
                held = made.held(slots[address])[: made.layout.elements]
                assert torch.equal(held, made.record(expert).cpu()), expert


def test_a_resident_expert_makes_room_for_one_that_is_completed() -> None:
    made = bench(experts=3)
    made.put(1, 0)
    made.put(2, 1)
    x, index = inputs(1), torch.tensor([[0]], device=DEVICE)
    with lane_of(made, 1, completing=True) as (_, block):
        view = view_of(made.row([ON_HOST, 0, 0], {1: 0, 2: 1}, [], 0))
        view.score.copy_(torch.tensor([9.0, 2.0, 1.0]))
        run(made, block, splitting(0.6), x, index, view)
        copy_rest(rest_of(block.view(0)))
        assert view.log.tolist() == [MISS_REPLACED | 2 << 8, 0, 0]
        assert view.address.tolist()[0] == made.slot(1) and view.ticket.tolist() == [0, 0, ON_HOST]
        assert torch.equal(made.held(1)[: made.layout.elements], made.record(0).cpu())
        view.log.zero_()
        out = run(made, block, splitting(0.6), x, index, view)
        assert view.log.tolist() == [HIT, 0, 0] and int(rest_of(block.view(0)).job[COLUMNS]) == 0
        assert_close(out, reference(made, x, index, torch.ones(1, 1, device=DEVICE), 1), 1)


@pytest.mark.parametrize("why", ["no slot", "takes too long", "whole"])
def test_nothing_is_completed(why: str) -> None:
    made = bench(experts=1)
    inner = made.shape.inner
    share = 1.0 if why == "whole" else 48 / inner
    rest_us = 0.99 * share * share if why == "takes too long" else LONG  # of `share`, what an expert takes
    landing = [] if why == "no slot" else [2]
    x, index = inputs(1), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    with lane_of(made, 1, completing=True) as (_, block):
        rest = rest_of(block.view(0))
        view = view_of(made.row([ON_HOST], {}, landing, 0))
        out = run(made, block, splitting(share, rest_us), x, index, view)
        assert_close(out, reference(made, x, index, torch.ones(1, 1, device=DEVICE), 1), 1)
        assert view.log.tolist() == [CPU if why == "whole" else MISS | 48 << 8]
        assert view.ticket.tolist() == [ON_HOST] and int(rest.job[COLUMNS]) == 0
        copy_rest(rest)
        assert made.arena.isnan().all() and int(rest.words[COPIED]) == 0
        if why == "takes too long":
            run(made, block, splitting(share, 1.01 * share * share), x, index, view)
            assert int(rest.job[COLUMNS]) == 48


def test_what_is_still_to_be_copied_leaves_more_to_the_cpu_until_the_next_pass() -> None:
    made = bench(experts=1)
    live = torch.ones(1, dtype=torch.int64, device=DEVICE)
    with lane_of(made, 1, completing=True) as (_, block):
        first = block.view(0)
        second = replace(first, layer=1)
        rest = rest_of(first)

        def shares() -> list[int]:
            found = []
            for lane in (first, second):
                view = view_of(made.row([ON_HOST], {}, [1], 0))
                group_pairs(missing(1), live, view, lane)
                found.append(int(lane.share))
            return found

        block.upload(0, LaneRates(0.0, 1.0, 0.0, 1.0, LONG))
        (alone, behind), inner = shares(), made.shape.inner
        assert alone / inner == pytest.approx(1 / 2, abs=0.1)
        assert behind / inner == pytest.approx((1 + alone / inner) / 2, abs=0.1) and behind > alone
        rest.words[COPIED] = rest.words[PLANNED]  # as if all were there
        assert int(rest.words[COPIED]) == int(rest.words[PLANNED])
        rest.words[PLANNED] += 10**6  # of a pass that was interrupted
        assert shares() == [alone, behind]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("activation", [ENDLESS_OAI, SILU], ids=lambda activation: activation.kind)
@pytest.mark.parametrize(
    ("hidden", "inner"),
    [(64, 192), (128, 256), pytest.param(2880, 2880, marks=pytest.mark.gpu, id="gpt-oss")],
)
def test_a_split_expert_in_mxfp4_is_whole_too(hidden: int, inner: int, activation: Activation) -> None:
    made = Both(hidden, inner, activation)
    quantum, record = split_quantum(inner, WeightForm.MXFP4), made.codes[1]
    with mxfp4_lane_of(made, completing=True) as (_, block):
        rest = rest_of(block.view(0))
        for share in range(quantum, inner, quantum):
            made.slots.fill_(255)
            block.upload(0, splitting(share / inner))
            made.run(made.codes, made.packed, 1, [2], torch.tensor([[1, -1]]), lane=block.view(0))
            assert int(rest.job[COLUMNS]) == share
            assert not torch.equal(made.slots[2, : len(record)].cpu(), record)
            copy_rest(rest)
            assert torch.equal(made.slots[2, : len(record)].cpu(), record)
            assert (made.slots[2, len(record) :] == 255).all() and (made.slots[3] == 255).all()
            assert int(rest.words[COPIED]) == int(rest.words[PLANNED])


def test_records_that_cannot_be_read_in_pieces_are_not_completed() -> None:
    made = bench()
    assert rest_pieces(made.layout, False, 16, torch.bfloat16)
    assert not rest_pieces(made.layout, False, 0, torch.bfloat16)
    assert not rest_pieces(made.layout, False, 16, torch.float32)
    assert not rest_pieces(made.layout, False, 6, torch.bfloat16)
