"""Device code that divides a layer's missing experts between the link and the CPU; grouping calls it. Decides
neither what is missing nor where it goes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shares_of_cpu(
    miss, alone, count, busy, rotation, rates, keys, E: tl.constexpr, I: tl.constexpr, Q: tl.constexpr,
    E_PAD: tl.constexpr, CHUNK: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Inner columns of each missing expert that the CPU computes, such that it ends when the link does. Those
    that it has `alone`, as the link does not reach them, it computes beside its share of the others.

    Taken in one order, the CPU gets whole experts as long as its sum of costs stays below what is left for
    the link, and a part of the next one. Those with the fewest tokens come first: over the link all cost the
    same. Of equals the one that was foretold comes first, for the CPU has begun to fetch it, else another one
    each time (`rotation`), so that none is always left to the CPU, and never kept. `busy`: experts, with a
    fraction, that the link has to bring before. rates: microseconds to hand a job over, of an expert on the
    CPU for one token, for each further one, and of an expert over the link. keys: int32 (E,), scratch.
    """
    e = tl.arange(0, E_PAD)
    first, further = tl.load(rates + 1), tl.load(rates + 2)
    costs = first + further * (count - 1).to(tl.float32)
    alone_us = tl.sum(tl.where(miss & alone, costs, 0.0), 0)
    whole = miss & alone
    miss = miss & (alone == 0)
    num_miss = tl.sum(miss.to(tl.int32), 0)
    if ONE_TOKEN:  # all are equals, so two sums along the experts do
        cost = tl.where(miss, first, 0.0)
        early = miss & (e < rotation)
        total, before = tl.sum(cost, 0), tl.sum(tl.where(early, cost, 0.0), 0)
        num_before = tl.sum(early.to(tl.int32), 0)
        spent = tl.cumsum(cost, 0) - cost + tl.where(e < rotation, total - before, -before)
        place = tl.cumsum(miss.to(tl.int32), 0) - 1
        place += tl.where(e < rotation, num_miss - num_before, -num_before)
        share = _share(place, spent + alone_us, cost, busy, num_miss, rates, I, Q)
    else:
        turn = tl.where(e < rotation, e - rotation + E, e - rotation)
        key = count * E_PAD + turn
        tl.store(keys + tl.cumsum(miss.to(tl.int32), 0) - 1, key, mask=miss)
        tl.debug_barrier()
        cost = costs
        place, spent = tl.zeros_like(count), cost * 0.0 + alone_us
        for begin in range(0, num_miss, CHUNK):
            j = begin + tl.arange(0, CHUNK)
            other = tl.load(keys + j, mask=j < num_miss, other=1 << 30)
            smaller = other[:, None] < key[None, :]
            other_cost = first + further * (other // E_PAD - 1).to(tl.float32)
            place += tl.sum(smaller.to(tl.int32), 0)
            spent += tl.sum(tl.where(smaller, other_cost[:, None], 0.0), 0)
        share = _share(place, spent, cost, busy, num_miss, rates, I, Q)
        tl.debug_barrier()  # all keys are read; shares take their place
    return tl.where(whole, I, tl.where(miss, share, 0))


@triton.jit
def _share(place, spent, cost, busy, num_miss, rates, I: tl.constexpr, Q: tl.constexpr):
    """Columns for the CPU of the expert at `place`, before which it has spent `spent` microseconds."""
    handover, link = tl.load(rates), tl.load(rates + 3)
    left = (busy + (num_miss - place).to(tl.float32)) * link
    part = (left - spent - handover) / (cost + link)
    part = tl.minimum(tl.maximum(part, 0.0), 1.0)
    if Q > 0:
        share = tl.minimum(((part * I) / Q + 0.5).to(tl.int32) * Q, I)
    else:
        share = tl.where(part >= 0.5, I, 0)
    return share
