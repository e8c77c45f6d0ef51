"""Kimi Delta Attention in a transformers model: linear attention by the gated delta rule in which each
channel decays by itself (Kimi Team 2025, "Kimi Linear"), with or without a limit, and where decays come
through a narrow product or at once. Found by the names of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.delta_rule import (
    DecayGate,
    reference_delta_inputs,
    reference_delta_rule,
    reference_gated_norm,
)
from localmoe.kernels.recurrent_shapes import ScanShape

_SIZES = ("num_heads", "head_dim", "conv_kernel_size")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "b_proj")
_NARROW, _FURTHER = ("forget_gate.f_a_proj", "g_a_proj"), ("forget_gate.f_b_proj", "g_b_proj")
_WIDE = ("forget_gate.f_proj", "g_proj")
_SMALL_HIDDEN, _SMALL_HEADS, _SMALL_DIM = 48, 2, 16


@dataclass(frozen=True, slots=True)
class ChannelDeltaNet:
    """A module of a decoder layer. narrow: decays and gates come through a narrow product. gate: how decays
    are made."""

    module: Any
    shape: ScanShape
    narrow: bool
    gate: DecayGate

    @classmethod
    def of(cls, module: nn.Module) -> ChannelDeltaNet | None:
        """None where the module has other parts."""
        sizes = [getattr(module, name, None) for name in _SIZES]
        convolution, norm = getattr(module, "conv1d", None), getattr(module, "o_norm", None)
        gate = getattr(module, "forget_gate", None)
        if not all(type(size) is int for size in sizes) or getattr(module, "activation", "") != "silu":
            return None
        narrow = isinstance(_part(module, _NARROW[0]), nn.Linear)
        names = (*_PROJECTIONS, *((*_NARROW, *_FURTHER) if narrow else _WIDE), "o_proj")
        linears = [_part(module, name) for name in names]
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
        made = _decay_gate(gate, rounded=not narrow)
        return cls(module, shape, narrow, made) if shape.fits else None

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that are alike."""
        return self.shape, self.narrow, self.gate

    @property
    def projections(self) -> list[nn.Linear]:
        """Of its input: to queries, keys, values, rates of correction, and to what makes decays and gates."""
        names = (*_PROJECTIONS, *(_NARROW if self.narrow else _WIDE))
        return [_part(self.module, name) for name in names]

    @property
    def a_log(self) -> Tensor:
        """(heads,)."""
        flat: Tensor = self.module.forget_gate.A_log.view(-1)
        return flat

    def decays(self, parts: list[Tensor]) -> Tensor:
        """(T, heads * dim), what each channel's decay is made of; parts: of the projections."""
        return self._widened(parts[4], _FURTHER[0])

    def gates(self, parts: list[Tensor]) -> Tensor:
        """(T, heads * dim) of the norm; parts: of the projections."""
        return self._widened(parts[5], _FURTHER[1])

    def _widened(self, part: Tensor, name: str) -> Tensor:
        found: Tensor = _part(self.module, name)(part) if self.narrow else part
        return found

    def rounds_as_said(self, hidden: Tensor) -> bool:
        """Whether decays are rounded, or not, as `gate` has it. hidden: (1, T, H) of 16 bits, as weights."""
        return bool(self.module.forget_gate(hidden).dtype == hidden.dtype) == self.gate.rounded

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
            x, before, module.conv1d.weight[:, 0], decays, parts[3], self.a_log, bias, self.gate
        )
        state = torch.zeros(
            shape.value_heads, shape.value_dim, shape.key_dim, device=x.device, dtype=torch.float32
        )
        out, _ = reference_delta_rule(inputs, state, shape)
        norm = module.o_norm
        normed = reference_gated_norm(out, gates, norm.weight, norm.variance_epsilon, sigmoid=True)
        projected: Tensor = module.o_proj(normed.flatten(1))
        return projected


def _decay_gate(gate: Any, *, rounded: bool) -> DecayGate:
    """Of a module's part that makes decays."""
    least = getattr(gate, "safe_gate_lower_bound", None)
    if getattr(gate, "safe_gate", False):
        least = getattr(gate, "lower_bound", None)
    return DecayGate(None if least is None else float(least), rounded)


def _part(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
