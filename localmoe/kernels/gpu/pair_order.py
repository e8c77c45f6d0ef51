"""The order of (token, expert) pairs by expert, then by token: within the one program of grouping, or by
several, of more pairs than one compares with each other soon enough.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

COMPARED = 64  # numbers that a thread compares at a time
_MINE = 128  # pairs of a program that sorts
_BLOCKS = 16  # programs whose counts are read at a time


def sort_pairs(index: Tensor, live: Tensor, pairs: Tensor, num_experts: int) -> None:
    """Write all pairs of `index` (T, K) in their order into int32 `pairs` (T * K,); live: see group_pairs. By
    counting: each program counts its pairs' experts, then each knows where its own ones begin."""
    tokens, top_k = index.shape
    programs, padded = cdiv(tokens * top_k, _MINE), next_power_of_2(num_experts + 1)
    counts = pairs.new_empty(programs, padded)
    given = index, index.stride(0), index.stride(1), live, counts
    sizes = {"K": top_k, "E": num_experts, "E_PAD": padded, "MINE": _MINE, "num_warps": 4}
    sizes |= after_previous(index.device)
    launch(_count, (programs,), *given, tokens, **sizes)
    launch(_place, (programs,), *given, pairs, tokens, programs, CHUNK=COMPARED, BLOCKS=_BLOCKS, **sizes)


@triton.jit
def chosen_by(index, stride, stride_k, p, num_pairs, K: tl.constexpr, E: tl.constexpr):
    """Experts of pairs; E where a pair is none."""
    found = tl.load(index + (p // K) * stride + (p % K) * stride_k, mask=p < num_pairs, other=E).to(tl.int32)
    return tl.where((found >= 0) & (found < E), found, E)


@triton.jit
def places_of(chosen, num_pairs, keys, P_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Where each pair is in the order by expert, then by token. chosen: (P_PAD,), E from `num_pairs` on, so
    that these are behind all others. keys: int32 (num_pairs,), scratch. All are compared with all: sorting
    takes seconds to compile.
    """
    p = tl.arange(0, P_PAD)
    key = chosen * P_PAD + p
    tl.store(keys + p, key, mask=p < num_pairs)
    tl.debug_barrier()
    place = tl.maximum(p - num_pairs, 0)
    for begin in range(0, num_pairs, CHUNK):
        q = begin + tl.arange(0, CHUNK)
        other = tl.load(keys + q, mask=q < num_pairs, other=1 << 30)
        # summed within each thread
        place += tl.sum((other[:, None] < key[None, :]).to(tl.int32), 0)
    tl.debug_barrier()
    return place


@triton.jit(do_not_specialize=["index_stride", "tokens"])
def _count(
    index, index_stride, index_stride_k, live, counts, tokens,
    K: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, MINE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """counts: int32 (programs, E_PAD), how many of a program's pairs chose each expert, and E: none."""
    wait_for_previous(DEPENDENT, SMALL=True)
    num_pairs = tl.minimum(tl.load(live), tokens).to(tl.int32) * K
    p = tl.program_id(0) * MINE + tl.arange(0, MINE)
    chosen = chosen_by(index, index_stride, index_stride_k, p, num_pairs, K, E)
    tl.store(counts + tl.program_id(0) * E_PAD + tl.arange(0, E_PAD), tl.histogram(chosen, E_PAD))


@triton.jit(do_not_specialize=["index_stride", "tokens", "programs"])
def _place(
    index, index_stride, index_stride_k, live, counts, pairs, tokens, programs,
    K: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each program's pairs to where they are in the order, once all are counted."""
    wait_for_previous(DEPENDENT, SMALL=True)
    me, e = tl.program_id(0), tl.arange(0, E_PAD)
    num_pairs = tl.minimum(tl.load(live), tokens).to(tl.int32) * K
    total, earlier = tl.zeros([E_PAD], tl.int32), tl.zeros([E_PAD], tl.int32)
    for begin in range(0, programs, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        found = tl.load(
            counts + block[:, None] * E_PAD + e[None, :], mask=(block < programs)[:, None], other=0
        )  # fmt: skip
        total += tl.sum(found, 0)
        earlier += tl.sum(tl.where((block < me)[:, None], found, 0), 0)
    first = tl.cumsum(total, 0) - total + earlier
    p = me * MINE + tl.arange(0, MINE)
    mine = chosen_by(index, index_stride, index_stride_k, p, num_pairs, K, E)
    place = tl.gather(first, mine, 0)
    for begin in range(0, MINE, CHUNK):
        q = me * MINE + begin + tl.arange(0, CHUNK)
        other = chosen_by(index, index_stride, index_stride_k, q, num_pairs, K, E)[:, None]
        place += tl.sum(((other == mine[None, :]) & (q[:, None] < p[None, :])).to(tl.int32), 0)
    tl.store(pairs + place, p, mask=p < tokens * K)
