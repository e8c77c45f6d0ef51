"""Torch references of the dense ops of a decode step: projections, norms, rotary embedding, cached
attention, router. They say what a result is, in the tensors' own dtype, and decide nothing about how a device
computes it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from localmoe.kernels.activations import Activation

ScoreKind = Literal["softmax", "sigmoid", "softmax_after_topk"]
SILU = Activation("silu")


def reference_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x W^T + bias (+ residual): (T, K) x (N, K) -> (T, N)."""
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def reference_linear_gated(x: Tensor, weight: Tensor, activation: Activation = SILU) -> Tensor:
    """act(gate) * up of (T, K) x (2I, K) = [gate; up] -> (T, I)."""
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return activation.apply(gate, up)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), summed in at least float32.

    Without an offset the normalised row is rounded to x.dtype before it meets the weight, as Llama does; with
    one the factor (offset + weight) is applied in float32 and the product is rounded once, as Gemma does.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset == 0.0:
        return weight * normed.to(x.dtype)
    return (normed * (weight_offset + weight.to(normed.dtype))).to(x.dtype)


def reference_apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: str = "halves"
) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021) of (1, heads, T, D) by cos and sin (1, T, R); R <= D, and what lies
    beyond R passes through. The halves of a head are paired, as in Llama; of pairs, see kernels.gpu.rope."""
    return _rotate(q, cos, sin, form), _rotate(k, cos, sin, form)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, form: str) -> Tensor:
    rotated = cos.shape[-1]
    turn, rest = x[..., :rotated], x[..., rotated:]
    if form != "halves":
        turn = torch.cat((turn[..., 0::2], turn[..., 1::2]), dim=-1)
        cos, sin = (part[..., : rotated // 2].repeat(1, 1, 2) for part in (cos, sin))
    low, high = turn.chunk(2, dim=-1)
    turned = turn * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    if form == "pairs":
        turned = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def reference_write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor
) -> None:
    """Put row i of key and value (1, kv_heads, T, D) at position start + i of the caches (1, kv_heads, C, D);
    positions from C on are dropped."""
    first = int(start)
    count = max(0, min(key.shape[2], key_cache.shape[2] - first))
    key_cache[:, :, first : first + count] = key[:, :, :count]
    value_cache[:, :, first : first + count] = value[:, :, :count]


def reference_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    until: Tensor | None = None,
) -> Tensor:
    """Causal attention of rows at positions start, start + 1, ... over a cache.

    Args:
        query: (1, heads, T, D). key_cache: (1, kv_heads, C, D). value_cache: (1, kv_heads, C, Dv).
        start: int64 (1,).
        window: positions that a row sees, itself among them; None for all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (heads,) logit of a further position of value zero.
        until: int (T,), up to which row each sees; None: up to itself.

    Returns:
        (T, heads, Dv).
    """
    first, rows = int(start), query.shape[2]
    live = first + rows
    group = query.shape[1] // key_cache.shape[1]
    key = key_cache[0, :, :live].repeat_interleave(group, 0)
    value = value_cache[0, :, :live].repeat_interleave(group, 0)
    scores = query[0] @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row = first + torch.arange(rows, device=query.device)[:, None]
    position = torch.arange(live, device=query.device)
    hidden = position > (row if until is None else first + until[:, None])
    if window is not None:
        hidden |= position <= row - window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores).view(-1, 1, 1).expand(-1, rows, 1)), dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., :live]
    return (shares @ value).transpose(0, 1)


def reference_latent_attention(
    query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    start: Tensor,
    *,
    scale: float,
) -> Tensor:
    """reference_attention over keys and values that are expanded from latent vectors (DeepSeek-V2, arXiv
    2405.04434, section 2.1).

    Args:
        query: (1, heads, T, Dn + Dr). latent_cache: (1, 1, C, R). rope_cache: (1, 1, C, Dr), of all heads.
        key_weight: (heads, Dn, R). value_weight: (heads, Dv, R).

    Returns:
        (T, heads, Dv).
    """
    live = int(start) + query.shape[2]
    latent, rope = latent_cache[:, :, :live], rope_cache[:, :, :live]
    key = torch.cat((latent @ key_weight.mT, rope.expand(-1, len(key_weight), -1, -1)), dim=-1)
    return reference_attention(query, key, latent @ value_weight.mT, start, scale=scale)


def reference_route(
    logits: Tensor,
    top_k: int,
    *,
    score: ScoreKind,
    renormalise: bool,
    choice_bias: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """Weights and indices (T, K) of the chosen experts, best first, from logits (T, E); equal ones in index
    order.

    Args:
        score: "softmax" over all experts, "sigmoid" of each, or "softmax_after_topk" over the chosen alone.
        renormalise: divide by the sum of the chosen; "softmax_after_topk" has that already.
        choice_bias: (E,) added for the choice, not to the weights.
        groups: count, of as many neighbours each, and how many of them may be chosen from: those whose two
            best are best together (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide
    if score != "softmax_after_topk":
        scores = torch.softmax(wide, dim=-1) if score == "softmax" else torch.sigmoid(wide)
    choice = scores if choice_bias is None else scores + choice_bias.to(scores)
    count, kept = groups
    if count > kept:
        grouped = choice.unflatten(-1, (count, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        open_to = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=logits.device)
        open_to.scatter_(-1, best[..., :kept], True)
        choice = grouped.masked_fill(~open_to[..., None], -torch.inf).flatten(-2)
    index = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, index)
    if score == "softmax_after_topk":
        return torch.softmax(weights, dim=-1), index
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), index
