"""Which missing expert the next layer will likely ask for, said to the CPU lane, or to the link, while they
have time to fetch. Chooses by what a router said; fetches nothing (kernels.cpu.fetch_ahead and copy_ahead
do)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.sizes import next_power_of_2
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.mailbox import JOB_SHIFT, LAYER_SHIFT, NOBODY
from localmoe.kernels.residency import ResidencyView
from localmoe.kernels.stage import StageView


def foretell(
    index: Tensor,
    weights: Tensor,
    residency: ResidencyView,
    layer: int,
    *,
    lane: LaneView | None = None,
    stage: StageView | None = None,
) -> None:
    """Say which expert is to be fetched first if one token chooses `index`: of those that are missing, the
    one with the largest weight.

    Args:
        index: int64 (1, K), an index outside the experts means "none". weights: (1, K), the router's.
        residency: of `layer`, the one to come.
        lane: of the layer at hand, whose job is counted already: the threads and the layer to come are told.
        stage: of any layer: who copies into it and the layer to come are told.
    """
    num_experts = residency.ticket.shape[0]
    assert index.shape == weights.shape and index.shape[0] == 1
    assert num_experts < NOBODY and layer < NOBODY
    launch(
        _foretell, (1,),
        index, index.stride(1), weights, weights.stride(1), residency.ticket,
        None if lane is None else lane.words, 0 if lane is None else lane.box + lane.layout.foretold,
        None if stage is None else stage.words, layer,
        K=index.shape[1], K_PAD=next_power_of_2(index.shape[1]), E=num_experts,
        JOB_SHIFT=JOB_SHIFT, LAYER_SHIFT=LAYER_SHIFT, NOBODY=NOBODY,
        **after_previous(index.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _foretell(
    index, index_stride, weights, weight_stride, tickets, lane_words, word_out, stage_words, layer,
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
    if lane_words is not None:
        tl.store(lane_words + 4, tl.where(found, place, -1))
        tl.store(
            word_out.to(tl.int64).to(tl.pointer_type(tl.int64)), (tl.load(lane_words) << JOB_SHIFT) | place
        )
    if stage_words is not None:
        tl.store(stage_words, tl.where(found, place, -1))
        tl.store(stage_words + 1, tl.load(stage_words + 1) + 1)
