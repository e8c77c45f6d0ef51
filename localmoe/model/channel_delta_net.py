"""Kimi Delta Attention in a transformers model: linear attention by the gated delta rule in which each
channel decays by itself (Kimi Team 2025, "Kimi Linear"). Found by the names of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.delta_rule import reference_delta_inputs, reference_delta_rule, reference_gated_norm
from localmoe.kernels.recurrent_shapes import ScanShape

_SIZES = ("num_heads", "head_dim", "conv_kernel_size")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
_FURTHER = ("forget_gate.f_b_proj", "g_b_proj", "o_proj")
_SMALL_HIDDEN, _SMALL_HEADS, _SMALL_DIM = 48, 2, 16


@dataclass(frozen=True, slots=True)
class ChannelDeltaNet:
    """A module of a decoder layer."""

    module: Any
    shape: ScanShape

    @classmethod
    def of(cls, module: nn.Module) -> ChannelDeltaNet | None:
        """None where the module has other parts."""
        sizes = [getattr(module, name, None) for name in _SIZES]
        convolution, norm = getattr(module, "conv1d", None), getattr(module, "o_norm", None)
        gate = getattr(module, "forget_gate", None)
        if not all(type(size) is int for size in sizes) or getattr(module, "activation", "") != "silu":
            return None
        linears = [_part(module, name) for name in (*_PROJECTIONS, *_FURTHER)]
        if not all(isinstance(linear, nn.Linear) for linear in linears):
            return None
        if any(linear.bias is not None for linear in linears[:-1]):
            return None
        if not isinstance(convolution, nn.Conv1d) or convolution.bias is not None:
            return None
        if not hasattr(norm, "variance_epsilon") or getattr(norm, "activation", "") != "sigmoid":
            return None
        if not all(isinstance(getattr(gate, name, None), nn.Parameter) for name in ("A_log", "dt_bias")):
            return None
        heads, dim, taps = sizes
        shape = ScanShape(heads, heads, dim, dim, taps, by_channel=True)  # type: ignore[arg-type]
        return cls(module, shape) if shape.fits else None

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that are alike."""
        return (self.shape,)

    @property
    def projections(self) -> list[nn.Linear]:
        """Of its input: to queries, keys, values, rates of correction, and to what makes decays and gates."""
        return [_part(self.module, name) for name in _PROJECTIONS]

    @property
    def a_log(self) -> Tensor:
        """(heads,)."""
        flat: Tensor = self.module.forget_gate.A_log.view(-1)
        return flat

    def decays(self, parts: list[Tensor]) -> Tensor:
        """(T, heads * dim), what each channel's decay is made of; parts: of the projections."""
        found: Tensor = self.module.forget_gate.f_b_proj(parts[4])
        return found

    def gates(self, parts: list[Tensor]) -> Tensor:
        """(T, heads * dim) of the norm; parts: of the projections."""
        found: Tensor = self.module.g_b_proj(parts[5])
        return found

    def small_sizes(self) -> dict[str, Any]:
        """Of a configuration that makes a small one."""
        return {
            "hidden_size": _SMALL_HIDDEN,
            "linear_num_heads": _SMALL_HEADS,
            "linear_head_dim": _SMALL_DIM,
        }

    def reference(self, hidden: Tensor) -> Tensor:
        """(T, H) -> (T, H) of a text that begins with it."""
        module, shape = self.module, self.shape
        parts = [linear(hidden) for linear in self.projections]
        decays, gates = (
            found.unflatten(1, (shape.value_heads, -1)) for found in (self.decays(parts), self.gates(parts))
        )
        x = torch.cat(parts[:3], dim=1)
        before = x.new_zeros(shape.taps - 1, shape.channels)
        bias = module.forget_gate.dt_bias.view(shape.value_heads, -1)
        inputs = reference_delta_inputs(
            x, before, module.conv1d.weight[:, 0], decays, parts[3], self.a_log, bias
        )
        state = torch.zeros(shape.value_heads, shape.value_dim, shape.key_dim, device=x.device)
        out, _ = reference_delta_rule(inputs, state, shape)
        norm = module.o_norm
        normed = reference_gated_norm(out, gates, norm.weight, norm.variance_epsilon, sigmoid=True)
        projected: Tensor = module.o_proj(normed.flatten(1))
        return projected


def _part(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
