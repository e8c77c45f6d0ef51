"""Group a decode window's (token, expert) pairs by expert on the device, look each expert up in the residency
table, and find a place for what is missing. One program a layer; no host takes part. Decides no prefetch: the
scores that pick a victim are the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.residency import ResidencyView


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs sorted by expert, and one tile an expert: those that are missing first (the link is the long
    pole), then those in slots, last those whose copy is still running.

    Attributes:
        pairs: int32 (P,), token * K + k, sorted by expert.
        begin, end: int32 (A,), the tile's range in `pairs`; empty for unused tiles.
        expert: int32 (A,).
        address: int64 (A,), of the weights.
        ticket: int64 (A,), the copy to wait for, or 0.
        landing: int64 (A,), slot that the weights are also written to while they are read, or 0.
    """

    pairs: Tensor
    begin: Tensor
    end: Tensor
    expert: Tensor
    address: Tensor
    ticket: Tensor
    landing: Tensor

    @staticmethod
    def empty(num_pairs: int, num_tiles: int, device: torch.device) -> Groups:
        """Room for the groups of `num_pairs` pairs."""

        def make(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        tiles = [make(num_tiles, torch.int32) for _ in range(3)]
        places = [make(num_tiles, torch.int64) for _ in range(3)]
        return Groups(make(num_pairs, torch.int32), *tiles, *places)


def group_pairs(index: Tensor, live: Tensor, residency: ResidencyView) -> Groups:
    """Group the choices of a window's router.

    Args:
        index: int64 (T, K), chosen experts; an index outside the experts means "none".
        live: int32 (1,), tokens after these are padding and demand nothing.
        residency: the layer's part of the table; its log is overwritten.
    """
    tokens, top_k = index.shape
    num_experts = residency.address.shape[0]
    num_pairs = tokens * top_k
    groups = Groups.empty(num_pairs, min(num_experts, num_pairs), index.device)
    padded_pairs = max(16, triton.next_power_of_2(num_pairs))
    _group[(1,)](
        index, index.stride(0), index.stride(1), live,
        residency.address, residency.ticket, residency.score, residency.landing, residency.done,
        groups.pairs, groups.begin, groups.end, groups.expert, groups.address, groups.ticket, groups.landing,
        residency.log, tokens, groups.begin.shape[0], residency.landing.shape[0],
        K=top_k, E=num_experts, P_PAD=padded_pairs, E_PAD=triton.next_power_of_2(num_experts + 1),
        num_warps=4 if padded_pairs <= 256 else 16,
    )  # fmt: skip
    return groups


@triton.jit
def _group(
    index, index_stride, index_stride_k, live, table, tickets, scores, free_slots, done_at,
    pairs, begins, ends, experts, addresses, waits, landings, log, tokens, tiles, num_landing,
    K: tl.constexpr, E: tl.constexpr, P_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    p = tl.arange(0, P_PAD)
    row = p // K
    valid = row < tl.minimum(tl.load(live), tokens)
    chosen = tl.load(index + row * index_stride + (p % K) * index_stride_k, mask=valid, other=E).to(tl.int32)
    chosen = tl.where((chosen >= 0) & (chosen < E), chosen, E)
    key = tl.sort(chosen * P_PAD + p)  # by expert, then by token: the order does not depend on padding
    tl.store(pairs + p, key % P_PAD, mask=p < tokens * K)
    count = tl.histogram(key // P_PAD, E_PAD)
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
    num_miss = tl.sum(miss.to(tl.int32), 0)
    num_hit = tl.sum(hit.to(tl.int32), 0)
    num_late = tl.sum(late.to(tl.int32), 0)
    miss_rank = tl.cumsum(miss.to(tl.int32), 0) - 1
    rank = tl.where(hit, num_miss + tl.cumsum(hit.to(tl.int32), 0) - 1, miss_rank)
    rank = tl.where(late, num_miss + num_hit + tl.cumsum(late.to(tl.int32), 0) - 1, rank)

    # a place for what is missing: free slots first, then the worst of this layer's experts that nobody asked
    # for. Only this layer reads them, and it runs once a pass, so they may be overwritten at once.
    landing = tl.load(free_slots + miss_rank, mask=miss & (miss_rank < num_landing), other=0)
    homeless = miss & (landing == 0)
    kind = tl.where(miss, tl.where(landing != 0, 4 | (miss_rank << 8), 3), 0)
    kind = tl.where(hit, 1, tl.where(late, 2, kind))
    replaceable = exists & (count == 0) & (ticket >= 0) & (ticket <= done)
    score = tl.load(scores + e, mask=exists, other=float("inf"))
    score = tl.where(replaceable, score, float("inf"))
    order = tl.cumsum(homeless.to(tl.int32), 0) - 1
    i = 0
    while i < tl.sum(homeless.to(tl.int32), 0):
        worst = tl.min(score, 0)
        if worst < float("inf"):
            victim = tl.argmin(score, 0)
            slot = tl.sum(tl.where(e == victim, address, 0), 0)
            mine = homeless & (order == i)
            landing = tl.where(mine, slot, landing)
            kind = tl.where(mine, 5 | (victim << 8), kind)
            score = tl.where(e == victim, float("inf"), score)
        i += 1
    tl.store(log + e, kind, mask=exists)

    tl.store(begins + rank, begin, mask=asked)
    tl.store(ends + rank, begin + count, mask=asked)
    tl.store(experts + rank, e, mask=asked)
    tl.store(addresses + rank, address, mask=asked)
    tl.store(waits + rank, tl.maximum(ticket, 0), mask=asked)
    tl.store(landings + rank, landing, mask=asked)
    unused = (e >= num_miss + num_hit + num_late) & (e < tiles)
    tl.store(begins + e, tl.zeros_like(begin), mask=unused)
    tl.store(ends + e, tl.zeros_like(begin), mask=unused)
