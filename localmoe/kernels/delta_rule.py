"""The gated delta rule of linear attention (Yang et al. 2024, "Gated Delta Networks", equation 10; with a
decay for each channel: Kimi Team 2025, "Kimi Linear", equation 1) and what leads to and from it in a decoder
layer: torch references in the tensors' own dtype and float32. Keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localmoe.kernels.recurrent_shapes import ScanShape
from localmoe.kernels.short_conv import reference_convolution

L2_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What the rule reads of T tokens.

    Attributes:
        mixed: (T, C), convolved, before queries and keys are normalised.
        decay: float32 (T, value_heads), or of each channel (T, value_heads, key_dim): how much is kept of the
            state.
        beta: float32 (T, value_heads): how much of an error is corrected.
    """

    mixed: Tensor
    decay: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True)
class DecayGate:
    """How a layer makes decays of what it projects.

    Attributes:
        least: logarithm of the strongest decay, to which a sigmoid leads; None: a softplus, without a limit.
        rounded: whether the logarithm is rounded to the dtype of what is projected.
    """

    least: float | None = None
    rounded: bool = False


UNBOUNDED = DecayGate()


def reference_delta_inputs(
    x: Tensor, before: Tensor, weight: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor,
    gate: DecayGate = UNBOUNDED,
) -> DeltaInputs:  # fmt: skip
    """Causal convolution of each channel, SiLU, and the rates of each head.

    Args:
        x: (T, C) projected queries, keys and values. before: (taps - 1, C) of the tokens before.
        weight: (C, taps). a, b: (T, value_heads) projected. a_log, dt_bias: (value_heads,). With a decay for
            each channel a is (T, value_heads, key_dim), dt_bias (value_heads, key_dim).
        gate: how decays come from these.
    """
    mixed = F.silu(reference_convolution(x, before, weight, None))
    step = a.float() + dt_bias.float()
    rate = a_log.float().exp().view(-1, *(1,) * (step.dim() - 2))
    log = -rate * F.softplus(step) if gate.least is None else gate.least * torch.sigmoid(rate * step)
    log = log.to(x.dtype).float() if gate.rounded else log
    return DeltaInputs(mixed, torch.exp(log), b.sigmoid().float())


def reference_delta_rule(inputs: DeltaInputs, state: Tensor, shape: ScanShape) -> tuple[Tensor, Tensor]:
    """For each token, S <- S diag(decay), then S <- S + beta (v - S k) k^T, and S q comes out.

    Args:
        state: float32 (value_heads, value_dim, key_dim); not changed.

    Returns:
        (T, value_heads, value_dim) of the inputs' dtype, and the state behind the last token.
    """
    keys = shape.key_heads * shape.key_dim
    q, k, v = inputs.mixed.float().split((keys, keys, shape.value_heads * shape.value_dim), dim=1)
    q, k = (_normalised(part.unflatten(1, (shape.key_heads, -1)), shape) for part in (q, k))
    q, v = q / shape.key_dim**0.5, v.unflatten(1, (shape.value_heads, -1))
    out = []
    for token in range(len(v)):
        decay = inputs.decay[token].view(shape.value_heads, 1, -1)
        state = state * decay
        error = v[token] - torch.einsum("hvk,hk->hv", state, k[token])
        state = state + torch.einsum("hv,hk->hvk", error * inputs.beta[token, :, None], k[token])
        out.append(torch.einsum("hvk,hk->hv", state, q[token]))
    return torch.stack(out).to(inputs.mixed.dtype), state


def _normalised(heads: Tensor, shape: ScanShape) -> Tensor:
    length = torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPSILON)
    return (heads * length).repeat_interleave(shape.group, dim=1)


def reference_gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, sigmoid: bool = False
) -> Tensor:
    """RMS norm of the rows of x (..., D), times silu(gate); rounded to x.dtype before the weight, after it
    and at the end. sigmoid: times sigmoid(gate) instead, and rounded at the end alone."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if sigmoid:
        return (weight.float() * normed * gate.float().sigmoid()).to(x.dtype)
    return ((weight * normed.to(x.dtype)).float() * F.silu(gate.float())).to(x.dtype)
