"""The order of (token, expert) pairs by expert, then by token: within the one program of grouping, or by
several, of more pairs than one compares soon enough.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch

COMPARED = 64  # numbers that a thread compares at a time
_MINE = 64  # pairs of a program that sorts


def sort_pairs(index: Tensor, live: Tensor, pairs: Tensor, num_experts: int) -> None:
    """Write all pairs of `index` (T, K) in their order into int32 `pairs` (T * K,); live: see group_pairs."""
    tokens, top_k = index.shape
    launch(
        _sort, (triton.cdiv(tokens * top_k, _MINE),),
        index, index.stride(0), index.stride(1), live, pairs, tokens,
        K=top_k, E=num_experts, MINE=_MINE, CHUNK=COMPARED, **after_previous(index.device), num_warps=4,
    )  # fmt: skip


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
def _sort(
    index, index_stride, index_stride_k, live, pairs, tokens,
    K: tl.constexpr, E: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The order by expert, then by token, of more pairs than one program compares soon enough: each finds
    where MINE of them are."""
    wait_for_previous(DEPENDENT, SMALL=True)
    num_pairs = tl.minimum(tl.load(live), tokens).to(tl.int32) * K
    p = tl.program_id(0) * MINE + tl.arange(0, MINE)
    mine = chosen_by(index, index_stride, index_stride_k, p, num_pairs, K, E)
    place = tl.maximum(p - num_pairs, 0)
    for begin in range(0, num_pairs, CHUNK):
        q = begin + tl.arange(0, CHUNK)
        other = chosen_by(index, index_stride, index_stride_k, q, num_pairs, K, E)[:, None]
        before = (other < mine[None, :]) | ((other == mine[None, :]) & (q[:, None] < p[None, :]))
        place += tl.sum((before & (q < num_pairs)[:, None]).to(tl.int32), 0)
    tl.store(pairs + place, p, mask=p < tokens * K)
