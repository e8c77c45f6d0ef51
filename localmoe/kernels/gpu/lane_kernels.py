"""The GPU's side of the CPU lane: make a job known to the threads that wait for it. grouping says what is in
the job, routed_experts' combine takes the answer in.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.grouping import Groups
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.sizes import next_power_of_2
from localmoe.kernels.lanes import LaneView


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
        K=top_k, K_PAD=next_power_of_2(top_k), H=hidden, BH=next_power_of_2(hidden),
        **after_previous(x.device), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "tokens"])
def _post(
    x, x_stride, pairs, live, count, words, flag, head, pairs_out, x_out, layer, tokens,
    K: tl.constexpr, K_PAD: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    jobs = tl.load(count)
    if jobs > 0:
        token = tl.program_id(0)
        rows = tl.minimum(tl.load(live), tokens).to(tl.int32)
        if token < rows:
            h = tl.arange(0, BH)
            row = tl.load(x + token * x_stride + h, mask=h < H, other=0.0)
            target = x_out.to(tl.int64).to(tl.pointer_type(x.dtype.element_ty))
            tl.store(target + token.to(tl.int64) * H + h, row, mask=h < H)
            k = tl.arange(0, K_PAD)  # of the sorted pairs, as many as a token has
            some = tl.load(pairs + token * K + k, mask=k < K, other=0)
            tl.store(pairs_out.to(tl.int64).to(tl.pointer_type(tl.int32)) + token * K + k, some, mask=k < K)
        if token == 0:
            at = head.to(tl.int64).to(tl.pointer_type(tl.int32))
            tl.store(at, layer)
            tl.store(at + 1, jobs)
            tl.store(at + 2, rows)
        tl.debug_barrier()
        # the atomic orders all that was written before it, also as the host sees it
        if tl.atomic_add(words + 3, 1, sem="acq_rel", scope="sys") == tokens - 1:
            tl.store(words + 3, tl.zeros([], tl.int64))
            tl.store(flag.to(tl.int64).to(tl.pointer_type(tl.int64)), tl.load(words))


def wait_for_answer(lane: LaneView) -> None:
    """Until the job at hand is answered. One program looks at the mailbox: where many do, the answer comes
    late."""
    answer = lane.box + lane.layout.answered
    launch(
        _wait_for_answer, (1,), lane.count, lane.words, answer, lane.patience,
        **after_previous(lane.words.device), num_warps=1,
    )  # fmt: skip


@triton.jit
def _wait_for_answer(count, words, answer, patience, DEPENDENT: tl.constexpr):
    wait_for_previous(DEPENDENT, SMALL=True)
    if tl.load(count) > 0:
        await_answer(words, answer, patience, True)


@triton.jit
def await_answer(words, answer, patience, counts):
    """Until the CPU has answered the last job that was posted, or nobody will; the latter is noted for all
    that come later."""
    job = tl.load(words)
    at = answer.to(tl.int64).to(tl.pointer_type(tl.int64))
    if tl.load(words + 1, volatile=True) == 0:
        seen = tl.load(at, volatile=True)
        if counts & (seen != job):
            tl.store(words + 2, tl.load(words + 2) + 1)
        looks = 0
        while (seen >= 0) & (seen < job) & (looks < patience):
            seen = tl.load(at, volatile=True)
            looks += 1
        if seen != job:
            tl.store(words + 1, tl.full([], 1, tl.int64))
    tl.debug_barrier()
