"""The router of a Mixture-of-Experts layer: logits, scores, the top k of them. Decides nothing of what
follows.

The dot is too long for one multiprocessor and has too few columns for many, so its depth is cut at fixed
places into parts of their own programs; a second kernel, one program a row, adds a row's parts in order and
picks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.dense import ScoreKind
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

PART_DEPTH = 256  # columns of x a part of the dot
MOST_CHOSEN, MOST_EXPERTS = 16, 512
_BM, _BN = 16, 16


@without_modes
def route(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    score: ScoreKind,
    renormalise: bool,
    bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (T, k) in out_dtype, indices (T, k) int64, best first, and logits (T, E).

    Semantics of dense.reference_route on logits = x W^T + bias, rounded to logits_dtype; among equal experts
    the lowest index wins. A row's bits do not depend on the other rows.

    Args:
        x: (T, H) bfloat16 or float16, any strides. weight: (E, H) of its dtype or float32, rows contiguous; E
            up to 512.
        bias: (E,) of the logits. choice_bias: (E,) added to scores for the choice alone.
        groups: see dense.reference_route; with more than are chosen from, E is a power of two.
        scale: of the weights. expert_scale: (E,), likewise, of each expert.
        logits_dtype: x.dtype if None; float32 keeps the sums as they are.
    """
    (rows, depth), experts = x.shape, weight.shape[0]
    assert weight.dtype in (x.dtype, torch.float32), f"{weight.dtype}"
    assert weight.shape[1] == depth and weight.stride(1) == 1, f"{weight.shape}"
    assert 0 < top_k <= min(experts, MOST_CHOSEN) and experts <= MOST_EXPERTS, f"{top_k} of {experts} experts"
    count, kept = groups
    if count > kept:
        size = experts // count
        assert experts == next_power_of_2(experts) and count * size == experts, f"{groups} of {experts}"
        assert size >= 2 and 0 < top_k <= kept * size, f"{top_k} in {groups} of {experts}"
    parts = cdiv(depth, PART_DEPTH)
    sums = torch.empty((parts, rows, experts), dtype=torch.float32, device=x.device)
    launch(
        _router_parts, (cdiv(rows, _BM), cdiv(experts, _BN), parts),
        x, weight, sums, rows, depth, x.stride(0), x.stride(1), weight.stride(0),
        E=experts, EVEN_K=depth % PART_DEPTH == 0, BM=_BM, BN=_BN, BK=PART_DEPTH,
        **after_previous(x.device), num_warps=2, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    weights = torch.empty((rows, top_k), dtype=out_dtype, device=x.device)
    index = torch.empty((rows, top_k), dtype=torch.int64, device=x.device)
    logits = torch.empty((rows, experts), dtype=logits_dtype or x.dtype, device=x.device)
    launch(
        _router_choice, (rows,),
        sums, bias, choice_bias, expert_scale, weights, index, logits, scale, rows,
        PARTS=parts, E=experts, E_PAD=next_power_of_2(experts),
        K=top_k, K_PAD=next_power_of_2(top_k), GROUPS=count, OPEN=kept,
        SCORE=score, RENORMALISE=renormalise and score != "softmax_after_topk",
        **after_previous(x.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, index, logits


@triton.jit(do_not_specialize=["rows"])
def _router_parts(
    x, weight, sums, rows, depth, x_row, x_col, weight_row,
    E: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    in_rows = (m < rows)[:, None]
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    x_at = x + m[:, None].to(tl.int64) * x_row + k[None, :] * x_col
    w_at = weight + tl.where(n < E, n, 0)[:, None].to(tl.int64) * weight_row + k[None, :]
    in_k = (k >= 0 if EVEN_K else k < depth)[None, :]
    a = tl.load(x_at, mask=in_rows & in_k, other=0.0)
    b = tl.load(w_at, mask=in_k, other=0.0)
    total = tl.dot(a.to(b.dtype), tl.trans(b), input_precision="ieee")
    at = (tl.program_id(2) * rows + m).to(tl.int64)[:, None] * E + n[None, :]
    tl.store(sums + at, total, mask=in_rows & (n < E)[None, :])


@triton.jit(do_not_specialize=["rows"])  # alignment must not touch a sum's order
def _router_choice(
    sums, bias, choice_bias, expert_scale, weights, index, logits, scale, rows,
    PARTS: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr,
    SCORE: tl.constexpr, RENORMALISE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    inside = e < E
    logit = tl.zeros([E_PAD], tl.float32)
    for part in tl.static_range(PARTS):
        logit += tl.load(sums + (part * rows + row) * E + e, mask=inside, other=0.0)
    if bias is not None:
        logit += tl.load(bias + e, mask=inside, other=0.0).to(tl.float32)
    rounded = logit.to(logits.dtype.element_ty)
    tl.store(logits + row * E + e, rounded, mask=inside)
    score = tl.where(inside, rounded.to(tl.float32), float("-inf"))
    if SCORE == "softmax":
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    elif SCORE == "sigmoid":
        score = tl.sigmoid(score)
    choice = tl.where(inside, score, float("-inf"))
    if choice_bias is not None:
        choice += tl.load(choice_bias + e, mask=inside, other=0.0).to(tl.float32)
    if GROUPS > OPEN:
        choice = _of_best_groups(choice, E_PAD, GROUPS, OPEN)

    j = tl.arange(0, K_PAD)
    top = tl.full([K_PAD], float("-inf") if SCORE == "softmax_after_topk" else 0.0, tl.float32)
    chosen = tl.zeros([K_PAD], tl.int32)
    for i in tl.static_range(K):
        best = tl.minimum(tl.argmax(choice, 0), E - 1)  # in range even where scores are NaN
        top = tl.where(j == i, tl.sum(tl.where(e == best, score, 0.0), 0), top)
        chosen = tl.where(j == i, best, chosen)
        choice = tl.where(e == best, float("-inf"), choice)
    if SCORE == "softmax_after_topk":
        top = tl.exp(top - tl.max(top, 0))
        top = top / tl.sum(top, 0)
    if RENORMALISE:
        top = top / tl.sum(top, 0)
    top *= scale
    if expert_scale is not None:
        top *= tl.load(expert_scale + chosen).to(tl.float32)
    tl.store(weights + row * K + j, top.to(weights.dtype.element_ty), mask=j < K)
    tl.store(index + row * K + j, chosen.to(tl.int64), mask=j < K)


@triton.jit
def _of_best_groups(choice, E: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr):
    """What decides, -inf in groups that are not chosen from."""
    SIZE: tl.constexpr = E // GROUPS
    grouped = tl.reshape(choice, [GROUPS, SIZE])
    member = tl.arange(0, SIZE)[None, :]
    first = tl.argmax(grouped, 1)[:, None]
    second = tl.max(tl.where(member == first, float("-inf"), grouped), 1)
    worth = tl.max(grouped, 1) + second
    group = tl.arange(0, GROUPS)
    chosen = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(OPEN):
        best = tl.argmax(worth, 0)
        chosen = tl.where(group == best, 1, chosen)
        worth = tl.where(group == best, float("-inf"), worth)
    return tl.reshape(tl.where(chosen[:, None] != 0, grouped, float("-inf")), [E])
