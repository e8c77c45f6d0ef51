"""The GPU's side of the CPU lane: make a job known to the threads that wait for it, and say which expert the
next one will likely ask for. grouping says what is in the job, routed_experts' combine takes the answer in.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.grouping import Groups
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.mailbox import JOB_SHIFT, LAYER_SHIFT, NOBODY
from localmoe.kernels.residency import ResidencyView


def post_job(x: Tensor, groups: Groups, live: Tensor, lane: LaneView, top_k: int) -> None:
    """Write the window's activations (T, H) and pairs into the mailbox, then the job's number. Nothing
    happens where `lane.count` is 0."""
    tokens, hidden = x.shape
    layout = lane.layout
    assert tokens <= layout.tokens and hidden == layout.hidden and top_k == layout.top_k
    launch(
        _post, (tokens,),
        x, x.stride(0), groups.pairs, live, lane.count, lane.words,
        lane.box + layout.posted, lane.box + layout.head, lane.box + layout.pairs, lane.box + layout.x,
        lane.layer, tokens,
        K=top_k, H=hidden, BH=triton.next_power_of_2(hidden),
        P_PAD=triton.next_power_of_2(tokens * top_k), **after_previous(x.device), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "tokens"])
def _post(
    x, x_stride, pairs, live, count, words, flag, head, pairs_out, x_out, layer, tokens,
    K: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, P_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    jobs = tl.load(count)
    if jobs > 0:
        token = tl.program_id(0)
        rows = tl.minimum(tl.load(live), tokens).to(tl.int32)
        if token < rows:
            h = tl.arange(0, BH)
            row = tl.load(x + token * x_stride + h, mask=h < H, other=0.0)
            target = x_out.to(tl.pointer_type(x.dtype.element_ty))
            tl.store(target + token.to(tl.int64) * H + h, row, mask=h < H)
        if token == 0:
            p = tl.arange(0, P_PAD)
            mine = p < rows * K
            tl.store(
                pairs_out.to(tl.pointer_type(tl.int32)) + p, tl.load(pairs + p, mask=mine, other=0), mask=mine
            )
            at = head.to(tl.pointer_type(tl.int32))
            tl.store(at, layer)
            tl.store(at + 1, jobs)
            tl.store(at + 2, rows)
            tl.store(at + 3, rows * K)
        tl.debug_barrier()
        # the atomic orders all that was written before it, also as the host sees it
        if tl.atomic_add(words + 3, 1, sem="acq_rel", scope="sys") == tokens - 1:
            tl.store(words + 3, tl.zeros([], tl.int64))
            tl.store(flag.to(tl.pointer_type(tl.int64)), tl.load(words))


def foretell(index: Tensor, weights: Tensor, residency: ResidencyView, lane: LaneView, layer: int) -> None:
    """Tell the threads, and the layer to come, which expert the CPU is to get first if one token chooses
    `index`: of those that are missing, the one with the largest weight.

    Args:
        index: int64 (1, K), an index outside the experts means "none". weights: (1, K), the router's.
        residency: of that layer. lane: of the layer at hand, whose job is counted already.
        layer: number of that layer.
    """
    num_experts = residency.ticket.shape[0]
    assert index.shape == weights.shape and index.shape[0] == 1
    assert num_experts < NOBODY and layer < NOBODY
    launch(
        _foretell, (1,),
        index, index.stride(1), weights, weights.stride(1), residency.ticket, lane.words,
        lane.box + lane.layout.foretold, layer,
        K=index.shape[1], K_PAD=triton.next_power_of_2(index.shape[1]), E=num_experts,
        JOB_SHIFT=JOB_SHIFT, LAYER_SHIFT=LAYER_SHIFT, NOBODY=NOBODY,
        **after_previous(index.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _foretell(
    index, index_stride, weights, weight_stride, tickets, words, word_out, layer,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr,
    JOB_SHIFT: tl.constexpr, LAYER_SHIFT: tl.constexpr, NOBODY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    k = tl.arange(0, K_PAD)
    chosen = tl.load(index + k * index_stride, mask=k < K, other=-1)
    weight = tl.load(weights + k * weight_stride, mask=k < K, other=0.0).to(tl.float32)
    exists = (chosen >= 0) & (chosen < E)
    missing = exists & (tl.load(tickets + chosen, mask=exists, other=0) < 0)
    best = tl.argmax(tl.where(missing, weight, float("-inf")), 0)
    found = tl.sum((missing & (k == best)).to(tl.int32), 0) > 0
    expert = tl.sum(tl.where(k == best, chosen, 0), 0)
    place = (layer.to(tl.int64) << LAYER_SHIFT) | tl.where(found, expert, NOBODY)
    tl.store(words + 4, tl.where(found, place, -1))
    tl.store(word_out.to(tl.pointer_type(tl.int64)), (tl.load(words) << JOB_SHIFT) | place)
