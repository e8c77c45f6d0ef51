"""Low-bit experts by torch's own operators, one expert after the other: what the fused kernels are measured
against. Launches no kernel of its own and never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.kernels.activations import Activation
from localmoe.kernels.lowbit import LowBitExperts


def one_by_one(
    x: Tensor, experts: LowBitExperts, index: Tensor, weights: Tensor, *, activation: Activation
) -> Tensor:
    """Sum over the chosen experts of weight * down(act(gate_up(x))), with their biases, in float32: each
    expert's codes are picked, turned into numbers, and multiplied.

    It may be captured in a CUDA graph; its temporaries (one expert in float32) are in no memory plan.

    Args:
        x: (T, H).
        index: (T, K) int64; an index outside 0..E-1 means no expert and contributes nothing.
        weights: (T, K).

    Returns:
        (T, H) in x's dtype.
    """
    exists = (index >= 0) & (index < experts.num_experts)
    chosen, shares = index.clamp(0, experts.num_experts - 1), weights.float() * exists
    rows = []
    for token in range(x.shape[0]):
        terms = [
            shares[token, k] * _expert(x[token].float(), experts, chosen[token, k : k + 1], activation)
            for k in range(index.shape[1])
        ]
        rows.append(torch.stack(terms).sum(dim=0))
    return torch.stack(rows).to(x.dtype)


def _expert(x: Tensor, experts: LowBitExperts, expert: Tensor, activation: Activation) -> Tensor:
    """(H,) of one token (H,); expert: int64 (1,) on the device."""
    hidden = _product(experts.gate_up.of(expert).dequantize(0), x)
    if experts.gate_up_bias is not None:
        hidden = hidden + experts.gate_up_bias.index_select(0, expert)[0].float()
    gate, up = hidden.chunk(2) if experts.gated else (hidden, hidden)
    out = _product(experts.down.of(expert).dequantize(0), activation.apply(gate, up))
    if experts.down_bias is not None:
        out = out + experts.down_bias.index_select(0, expert)[0].float()
    return out


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """W x; as a sum of products, which no mode of the passes sends to a kernel."""
    return (matrix * x).sum(dim=1)
