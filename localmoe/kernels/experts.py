"""Reference arithmetic of routed experts: one expert's MLP, and the weighted sum of chosen experts per token.

The order of the weighted sum is fixed (ascending expert index), so a token's result does not depend on the
order in which experts became available. Knows nothing of slots or transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's matrices on the compute device.

    Attributes:
        gate_up: (2I, H), or (H, 2I) when transposed.
        down: (H, I), or (I, H) when transposed.
        gate_up_bias, down_bias: (2I,) and (H,), or None.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool


def expert_mlp(x: Tensor, weights: ExpertWeights, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """down(gate(gate_up(x))) for the tokens routed to one expert.

    Args:
        x: (n, H), padded rows among them (see kernels.rows). gate: (n, 2I) -> (n, I).

    Returns:
        (n, H) in x.dtype.
    """
    if weights.transposed:
        hidden = x @ weights.gate_up
        hidden = hidden if weights.gate_up_bias is None else hidden + weights.gate_up_bias
        out = gate(hidden) @ weights.down
    else:
        hidden = F.linear(x, weights.gate_up)
        hidden = hidden if weights.gate_up_bias is None else hidden + weights.gate_up_bias
        out = F.linear(gate(hidden), weights.down)
    return out if weights.down_bias is None else out + weights.down_bias


def combine(expert_out: Tensor, top_k_index: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of each token's expert outputs, weighted, added in ascending expert order and rounded after each
    addition.

    Args:
        expert_out: (T, K, H), the output of the k-th chosen expert of each token.
        top_k_index: (T, K). top_k_weights: (T, K).

    Returns:
        (T, H) in `dtype`; the same bits as transformers' eager loop over experts.
    """
    weighted = (expert_out * top_k_weights[..., None]).to(dtype)
    order = top_k_index.argsort(dim=-1)
    weighted = weighted.gather(1, order[..., None].expand_as(weighted))
    total = torch.zeros_like(weighted[:, 0])
    for k in range(weighted.shape[1]):
        total = total + weighted[:, k]
    return total
