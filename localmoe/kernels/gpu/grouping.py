"""Group a pass's (token, expert) pairs by expert on the device, look each expert up in the residency table,
and find a place for what is missing. One program a layer, and some to sort many pairs; no host takes part.
Decides no prefetch: the scores that pick a victim are the policy's. Keeps the table up to date with what it
gives away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.copy_ahead import begin_layer
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.lane_shares import shares_of_cpu
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.pair_order import COMPARED, chosen_by, places_of, sort_pairs
from localmoe.kernels.gpu.rest_jobs import may_complete, plan_rest, rests_under_way
from localmoe.kernels.gpu.sizes import next_power_of_2
from localmoe.kernels.gpu.waiting import foresee
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.mailbox import LAYER_SHIFT
from localmoe.kernels.residency import ResidencyView
from localmoe.kernels.rests import RestView
from localmoe.kernels.stage import StageView

_SORTED_ALONE = 1024  # pairs that the one program sorts itself


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs sorted by expert, and one tile an expert that the GPU computes: those that are missing first (the
    link is the long pole), then those in slots, last those whose copy is still running.

    Attributes:
        pairs: int32 (P,), token * K + k, sorted by expert.
        begin, end: int32 (A,), the tile's range in `pairs`; empty for unused tiles.
        expert: int32 (A,).
        address: int64 (A,), of the weights.
        ticket: int64 (A,), the copy to wait for, or 0; None: all are here.
        landing: int64 (A,), slot that the weights are also written to while they are read, or 0; None: none
            is.
        skipped: int32 (A,), inner columns that the CPU computes instead, from 0 on; None where there is no
            CPU lane.
        stage: where a part of one expert may lie ahead of need; None where nothing is brought there.
        clock: see ResidencyView.
    """

    pairs: Tensor
    begin: Tensor
    end: Tensor
    expert: Tensor
    address: Tensor
    ticket: Tensor | None = None
    landing: Tensor | None = None
    skipped: Tensor | None = None
    stage: StageView | None = None
    clock: Tensor | None = None


@without_modes
def group_pairs(
    index: Tensor,
    live: Tensor,
    residency: ResidencyView,
    lane: LaneView | None = None,
    stage: StageView | None = None,
    most_tokens: int = 0,
) -> Groups:
    """Group the choices of a router.

    Args:
        index: int64 (T, K), chosen experts; an index outside the experts means "none".
        live: int32 (1,), tokens after these are padding and demand nothing.
        residency: the layer's part of the table; its log is overwritten, and address, ticket and landing are
            what they are once the layer has run.
        lane: takes its part of what is missing; its `share` and `count` are written, and the entries of a
            job into its mailbox (`post` makes the job known). With `rest`, an expert that is split may get a
            slot as well, and the copying of its rest is left as a job (`copy_rest` does it).
        stage: of this layer; what is copied into it ends here.
        most_tokens: T of the longest pass that the same compiled code is to serve; 0: this one's.
    """
    tokens, top_k = index.shape
    num_experts = residency.address.shape[0]
    num_pairs = tokens * top_k
    groups = _empty(num_pairs, min(num_experts, num_pairs), index, residency, lane, stage)
    padded_pairs = max(16, next_power_of_2(max(tokens, most_tokens) * top_k))
    sorts = padded_pairs <= _SORTED_ALONE
    if not sorts:
        sort_pairs(index, live, groups.pairs, num_experts)
    padded_experts = next_power_of_2(num_experts + 1)
    warps = 4 if padded_pairs <= 256 else 16
    launch(
        _group, (1,),
        index, index.stride(0), index.stride(1), live,
        residency.address, residency.home, residency.ticket, residency.score, residency.landing,
        residency.done,
        groups.pairs, groups.begin, groups.end, groups.expert, groups.address, groups.ticket, groups.landing,
        residency.log, tokens, groups.begin.shape[0], residency.landing.shape[0],
        residency.clock, residency.expert_ns,
        groups.skipped, *_lane_arguments(lane), *_stage_arguments(stage),
        *_rest_arguments(None if lane is None else lane.rest),
        LAYER_SHIFT=LAYER_SHIFT, R_PAD=next_power_of_2(residency.landing.shape[0]),
        K=top_k, E=num_experts, P_PAD=padded_pairs, E_PAD=padded_experts,
        P_CHUNK=_chunk(padded_pairs, warps), E_CHUNK=_chunk(padded_experts, warps), ONE_TOKEN=tokens == 1,
        SORTS=sorts, **after_previous(index.device), num_warps=warps,
    )  # fmt: skip
    return groups


def _chunk(padded: int, warps: int) -> int:
    """Of so many numbers those that all are compared with at a time."""
    return max(1, min(COMPARED, padded, COMPARED * 32 * warps // padded))


def _empty(
    num_pairs: int, num_tiles: int, index: Tensor, residency: ResidencyView, lane: LaneView | None,
    stage: StageView | None,
) -> Groups:  # fmt: skip
    pairs, begin, end, expert = (
        index.new_empty(size, dtype=torch.int32) for size in (num_pairs, num_tiles, num_tiles, num_tiles)
    )
    address, ticket, landing = (index.new_empty(num_tiles, dtype=torch.int64) for _ in range(3))
    skipped = None if lane is None else torch.empty_like(expert)
    return Groups(pairs, begin, end, expert, address, ticket, landing, skipped, stage, residency.clock)


def _lane_arguments(lane: LaneView | None) -> tuple[object, ...]:
    """share, count, words, issued, rates, address of the job's entries, layer, inner columns, quantum of a
    split."""
    if lane is None:
        return (None, None, None, None, None, 0, 0, 0, 0)
    entries = lane.box + lane.layout.entry
    numbers = (lane.layer, lane.inner, lane.quantum)
    return (lane.share, lane.count, lane.words, lane.issued, lane.rates, entries, *numbers)


def _stage_arguments(stage: StageView | None) -> tuple[object, ...]:
    """words, staged, layer."""
    return (None, None, 0) if stage is None else (stage.words, stage.staged, stage.layer)


def _rest_arguments(rest: RestView | None) -> tuple[object, ...]:
    """words, job, words that are counted for a quantum of columns, words of an expert."""
    if rest is None:
        return (None, None, 0, 0)
    return (rest.words, rest.job, rest.quantum_words, rest.record_words)


# what a simulation routes lies in another tensor, with rows further apart
@triton.jit(
    do_not_specialize=[
        "index_stride", "tokens", "tiles", "num_landing", "layer", "stage_layer", "expert_ns",
        "quantum_words", "record_words",
    ]
)  # fmt: skip
def _group(
    index, index_stride, index_stride_k, live, table, homes, tickets, scores, free_slots, done_at,
    pairs, begins, ends, experts, addresses, waits, landings, log, tokens, tiles, num_landing,
    clock, expert_ns,
    skips, shares, job_count, lane_words, issued, rates, entries, layer, I: tl.constexpr, Q: tl.constexpr,
    stage_words, staged, stage_layer, rest_words, rest_job, quantum_words, record_words,
    LAYER_SHIFT: tl.constexpr, R_PAD: tl.constexpr, K: tl.constexpr, E: tl.constexpr, P_PAD: tl.constexpr,
    E_PAD: tl.constexpr, P_CHUNK: tl.constexpr, E_CHUNK: tl.constexpr, ONE_TOKEN: tl.constexpr,
    SORTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """SORTS: the pairs, which are sorted already otherwise."""
    wait_for_previous(DEPENDENT, SMALL=True)
    p = tl.arange(0, P_PAD)
    num_pairs = tl.minimum(tl.load(live), tokens).to(tl.int32) * K
    chosen = chosen_by(index, index_stride, index_stride_k, p, num_pairs, K, E)
    if SORTS:
        tl.store(pairs + places_of(chosen, num_pairs, pairs, P_PAD, P_CHUNK), p, mask=p < tokens * K)
    count = tl.histogram(chosen, E_PAD)
    begin = tl.cumsum(count, 0) - count

    e = tl.arange(0, E_PAD)
    exists = e < E
    asked = exists & (count > 0)
    address = tl.load(table + e, mask=exists, other=0)
    ticket = tl.load(tickets + e, mask=exists, other=0)
    done = tl.atomic_add(done_at, 0, sem="acquire", scope="sys")
    miss = asked & (ticket < 0)
    late = asked & (ticket > done)
    hit = asked & (ticket >= 0) & (ticket <= done)
    share = tl.zeros_like(count)
    by_cpu = asked & (count < 0)  # none
    completed = by_cpu
    if stage_words is not None:
        begin_layer(stage_words, staged, stage_layer, LAYER_SHIFT)
    if shares is not None:
        posted = tl.load(lane_words)
        if rest_words is not None:
            planned, coming = rests_under_way(rest_words, layer)
        if tl.load(lane_words + 1) == 0:  # nobody has failed to answer
            busy = tl.maximum(tl.load(issued) - done, 0).to(tl.float32)
            if rest_words is not None:
                busy += coming.to(tl.float32) / record_words
            told = tl.load(lane_words + 4)
            is_told = told >> LAYER_SHIFT == layer
            rotation = tl.where(is_told, told & ((1 << LAYER_SHIFT) - 1), posted * 7 % E).to(tl.int32)
            share = shares_of_cpu(
                miss, ticket < -1, count, busy, rotation, rates, shares, E, I, Q, E_PAD, E_CHUNK, ONE_TOKEN
            )
        by_cpu = share == I
        job = share > 0
        num_jobs = tl.sum(job.to(tl.int32), 0)
        entry = tl.cumsum(job.to(tl.int32), 0) - 1
        at = entries.to(tl.int64).to(tl.pointer_type(tl.int32)) + entry
        tl.store(at, e, mask=job)
        tl.store(at + E, begin, mask=job)
        tl.store(at + 2 * E, begin + count, mask=job)
        tl.store(at + 3 * E, share, mask=job)
        tl.store(job_count, num_jobs)
        tl.debug_barrier()  # every warp has read both words
        tl.store(lane_words, posted + (num_jobs > 0).to(tl.int64))
        tl.store(lane_words + 4, tl.full([], -1, tl.int64))
        tl.store(shares + e, share, mask=exists)
        miss = miss & (share < I)
        if rest_words is not None:
            completed = miss & may_complete(share, rates, I)
    num_miss = tl.sum(miss.to(tl.int32), 0)
    num_hit = tl.sum(hit.to(tl.int32), 0)
    num_late = tl.sum(late.to(tl.int32), 0)
    miss_rank = tl.cumsum(miss.to(tl.int32), 0) - 1
    rank = tl.where(hit, num_miss + tl.cumsum(hit.to(tl.int32), 0) - 1, miss_rank)
    rank = tl.where(late, num_miss + num_hit + tl.cumsum(late.to(tl.int32), 0) - 1, rank)

    # a place for what is missing: free slots first, then the worst of this layer's experts that nobody asked
    # for. Only this layer reads them, and it runs once a pass, so they may be overwritten at once.
    # of what the CPU does a part of, no slot gets all, unless the rest follows
    whole = miss & ((share == 0) | completed)
    place = tl.cumsum(whole.to(tl.int32), 0) - 1
    landing = tl.load(free_slots + place, mask=whole & (place < num_landing), other=0)
    homeless = whole & (landing == 0)
    num_landed = tl.sum((landing != 0).to(tl.int32), 0)
    evicted = whole & (count < 0)  # none
    kind = tl.where(miss, tl.where(landing != 0, 4 | (place << 8), 3 | (share << 8)), 0)
    kind = tl.where(hit, 1, tl.where(late, 2, tl.where(by_cpu, 6, kind)))
    replaceable = exists & (count == 0) & (ticket >= 0) & (ticket <= done)
    score = tl.load(scores + e, mask=exists, other=float("inf"))
    score = tl.where(replaceable, score, float("inf"))
    order = tl.cumsum(homeless.to(tl.int32), 0) - 1
    rooms = tl.minimum(tl.sum(homeless.to(tl.int32), 0), tl.sum((score < float("inf")).to(tl.int32), 0))
    i = 0
    while i < rooms:
        victim = tl.argmin(score, 0)
        slot = tl.sum(tl.where(e == victim, address, 0), 0)
        mine = homeless & (order == i)
        landing = tl.where(mine, slot, landing)
        kind = tl.where(mine, 5 | (victim << 8), kind)
        score = tl.where(e == victim, float("inf"), score)
        evicted = evicted | (e == victim)
        i += 1
    tl.store(log + e, kind, mask=exists)
    if rest_words is not None:
        completed = completed & (landing != 0)
        plan_rest(rest_words, rest_job, completed, share, address, landing, planned, quantum_words, Q)

    # as the next pass finds it
    tl.store(table + e, landing, mask=landing != 0)
    tl.store(tickets + e, tl.zeros_like(ticket), mask=landing != 0)
    tl.store(table + e, tl.load(homes + e, mask=evicted, other=0), mask=evicted)
    tl.store(tickets + e, tl.full([E_PAD], -1, tl.int64), mask=evicted)
    if num_landed > 0:
        r = tl.arange(0, R_PAD)
        left = tl.load(free_slots + r + num_landed, mask=r + num_landed < num_landing, other=0)
        tl.debug_barrier()
        tl.store(free_slots + r, left, mask=r < num_landing)

    if clock is not None:
        elsewhere = tl.sum(asked.to(tl.int32), 0) - num_hit
        foresee(clock, num_miss + num_hit + num_late, elsewhere, expert_ns)
    tiled = asked & (by_cpu == 0)
    tl.store(begins + rank, begin, mask=tiled)
    tl.store(ends + rank, begin + count, mask=tiled)
    tl.store(experts + rank, e, mask=tiled)
    tl.store(addresses + rank, address, mask=tiled)
    tl.store(waits + rank, tl.maximum(ticket, 0), mask=tiled)
    tl.store(landings + rank, landing, mask=tiled)
    if shares is not None:
        tl.store(skips + rank, share, mask=tiled)
    unused = (e >= num_miss + num_hit + num_late) & (e < tiles)
    tl.store(begins + e, tl.zeros_like(begin), mask=unused)
    tl.store(ends + e, tl.zeros_like(begin), mask=unused)
