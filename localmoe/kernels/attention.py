"""Attention whose result for a query row does not depend on how many rows ride along. Decides no masking
rule.

Keys and values are read in blocks of fixed size at fixed positions; each block's partial softmax is a
product of fixed shape, and the partial sums are added in block order. A block that a row may not see
contributes exactly zero, so a row of a nine-token verify pass gets the same bits as in a one-token pass
(split-KV attention with a fixed split; the online softmax is that of Milakov and Gimelshein 2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

KV_BLOCK = 128  # cache positions a block; key and value tensors are multiples of it long
_MAX_QUERY_ROWS = 128  # rows a slice of a long prompt, which bounds the score matrix


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Masked attention of one sequence.

    Args:
        query: (heads, T, head_dim).
        key: (kv_heads, L, head_dim) with L a multiple of KV_BLOCK; heads is a multiple of kv_heads.
        value: (kv_heads, L, value_dim).
        mask: bool (1 or heads, T, L), True where the row may look. Each row sees at least one position.
        scale: factor on the scores.
        softcap: if given, scores become softcap * tanh(score / softcap).
        sinks: (heads,) logit of a virtual position with value zero, or None.

    Returns:
        (T, heads, value_dim) in query.dtype.
    """
    assert key.shape[1] % KV_BLOCK == 0, "the cache hands out whole blocks"
    rows = query.shape[1]
    parts = [
        _attend(
            query[:, i : i + _MAX_QUERY_ROWS],
            key,
            value,
            mask[:, i : i + _MAX_QUERY_ROWS],
            scale,
            softcap,
            sinks,
        )
        for i in range(0, rows, _MAX_QUERY_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    heads, rows, head_dim = query.shape
    kv_heads, length, value_dim = value.shape
    group, blocks = heads // kv_heads, length // KV_BLOCK
    # q (kv_heads, 1, group * T, D) x k (kv_heads, blocks, D, B) -> scores (kv_heads, blocks, group * T,
    # B), float32
    q = query.reshape(kv_heads, 1, group * rows, head_dim).float()
    k = key.view(kv_heads, blocks, KV_BLOCK, head_dim).float()
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(kv_heads, blocks, group, rows, KV_BLOCK)
    scores = scores.masked_fill(~_block_mask(mask, kv_heads, group, blocks), -torch.inf)
    block_max = scores.amax(-1)  # (kv_heads, blocks, group, T); -inf where a block is hidden from the row
    row_max = block_max.amax(1)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, group, 1).expand(-1, -1, rows)
        row_max = torch.maximum(row_max, sink)
    probabilities = torch.exp(scores - row_max[:, None, :, :, None])
    block_sum = probabilities.sum(-1)
    v = value.view(kv_heads, blocks, KV_BLOCK, value_dim).float()
    block_out = torch.matmul(probabilities.view(kv_heads, blocks, group * rows, KV_BLOCK), v)
    total, out = block_sum[:, 0], block_out[:, 0]
    for i in range(1, blocks):  # fixed order, so hidden blocks add exact zeros
        total, out = total + block_sum[:, i], out + block_out[:, i]
    if sinks is not None:
        total = total + torch.exp(sink - row_max)
    out = out.view(kv_heads, group, rows, value_dim) / total[..., None]
    return out.reshape(heads, rows, value_dim).transpose(0, 1).to(query.dtype).contiguous()


def _block_mask(mask: Tensor, kv_heads: int, group: int, blocks: int) -> Tensor:
    """(1 or heads, T, L) -> broadcastable to (kv_heads, blocks, group, T, KV_BLOCK)."""
    lead, rows, _ = mask.shape
    split = mask.view(lead, rows, blocks, KV_BLOCK).permute(0, 2, 1, 3)  # (lead, blocks, T, B)
    if lead == 1:
        return split[:, :, None]
    return split.reshape(kv_heads, group, blocks, rows, KV_BLOCK).transpose(1, 2)
