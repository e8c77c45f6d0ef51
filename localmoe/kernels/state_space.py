"""The state space of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs") and what leads to and from it in a
decoder layer: torch references in the tensors' own dtype and float32. Keeps no state.

It is linear attention with another rule than kernels.delta_rule: of what a layer is convolved to, C is what
asks, B the key and x the value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localmoe.kernels.recurrent_shapes import ScanShape
from localmoe.kernels.short_conv import reference_convolution


@dataclass(frozen=True, slots=True)
class SpaceInputs:
    """What the rule reads of T tokens.

    Attributes:
        mixed: (T, channels), convolved: x, B, C.
        decay, step: float32 (T, value_heads): how much of the state is kept, how much is added to it.
    """

    mixed: Tensor
    decay: Tensor
    step: Tensor


def reference_space_inputs(
    x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None,
    dt: Tensor, a_log: Tensor, dt_bias: Tensor, limits: tuple[float, float],
) -> SpaceInputs:  # fmt: skip
    """Causal convolution of each channel, SiLU, and the rates of each head.

    Args:
        x: (T, channels) projected: x, B, C. before, weight, bias: of reference_convolution.
        dt: (T, value_heads) projected. a_log, dt_bias: (value_heads,).
        limits: between which a step lies.
    """
    mixed = F.silu(reference_convolution(x, before, weight, bias))
    step = F.softplus(dt.float() + dt_bias.float()).clamp(*limits)
    return SpaceInputs(mixed, torch.exp(-a_log.float().exp() * step), step)


def reference_state_space(
    inputs: SpaceInputs, skip: Tensor, state: Tensor, shape: ScanShape
) -> tuple[Tensor, Tensor]:
    """For each token, S <- decay S + step x B^T, and S C + skip x comes out.

    Args:
        skip: (value_heads,), D of the paper.
        state: float32 (value_heads, value_dim, key_dim); not changed.

    Returns:
        (T, value_heads, value_dim) of the inputs' dtype, and the state behind the last token.
    """
    keys = shape.key_heads * shape.key_dim
    x, b, c = inputs.mixed.float().split((shape.values, keys, keys), dim=1)
    x = x.unflatten(1, (shape.value_heads, -1))
    b, c = (part.unflatten(1, (shape.key_heads, -1)).repeat_interleave(shape.group, 1) for part in (b, c))
    out = []
    for token in range(len(x)):
        added = torch.einsum("hv,hk->hvk", x[token] * inputs.step[token, :, None], b[token])
        state = state * inputs.decay[token, :, None, None] + added
        found = torch.einsum("hvk,hk->hv", state, c[token])
        out.append(found + skip.float()[:, None] * x[token])
    return torch.stack(out).to(inputs.mixed.dtype), state


def reference_group_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """RMS norm of each of the groups that x * silu(gate), (T, D), falls into; rounded to x.dtype before the
    weight, (D,), and after it."""
    wide = (x.float() * F.silu(gate.float())).unflatten(1, (groups, -1))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled: Tensor = weight * normed.flatten(1).to(x.dtype)
    return scaled
