"""Linear attention by the gated delta rule in a transformers model: found by the names of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.delta_rule import reference_delta_inputs, reference_delta_rule, reference_gated_norm
from localmoe.kernels.recurrent_shapes import ScanShape

_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
_APART, _GROUPED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")
_SMALL_HIDDEN, _SMALL_KEY_HEADS, _SMALL_KEY, _SMALL_VALUE = 48, 2, 16, 32


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A module of a decoder layer. grouped: what belongs to a key head lies together in its projections."""

    module: Any
    shape: ScanShape
    grouped: bool

    @classmethod
    def of(cls, module: nn.Module) -> DeltaNet | None:
        """None where the module has other parts."""
        sizes = [getattr(module, name, None) for name in _SIZES]
        convolution, norm = getattr(module, "conv1d", None), getattr(module, "norm", None)
        grouped = isinstance(getattr(module, _GROUPED[0], None), nn.Linear)
        names = (*(_GROUPED if grouped else _APART), "out_proj")
        if not all(type(size) is int for size in sizes) or getattr(module, "activation", "") != "silu":
            return None
        if not all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return None
        if not isinstance(convolution, nn.Conv1d) or not hasattr(norm, "variance_epsilon"):
            return None
        shape = ScanShape(*sizes)  # type: ignore[arg-type]
        plain = convolution.bias is None and not any(
            getattr(module, name).bias is not None for name in names[:-1]
        )
        if not shape.fits or not plain:
            return None
        return cls(module, shape, grouped)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that are alike."""
        return self.shape, self.grouped

    @property
    def projections(self) -> list[nn.Linear]:
        """Of its input."""
        return [getattr(self.module, name) for name in (_GROUPED if self.grouped else _APART)]

    def small_sizes(self) -> dict[str, Any]:
        """Of a configuration that makes a small one with as many value heads a key head."""
        return {
            "hidden_size": _SMALL_HIDDEN,
            "linear_num_key_heads": _SMALL_KEY_HEADS,
            "linear_num_value_heads": _SMALL_KEY_HEADS * self.shape.group,
            "linear_key_head_dim": _SMALL_KEY,
            "linear_value_head_dim": _SMALL_VALUE,
        }

    def reference(self, hidden: Tensor) -> Tensor:
        """(T, H) -> (T, H) of a text that begins with it."""
        module, shape = self.module, self.shape
        x, z, b, a = self._parts(hidden)
        before = x.new_zeros(shape.taps - 1, shape.channels)
        inputs = reference_delta_inputs(
            x, before, module.conv1d.weight[:, 0], a, b, module.A_log, module.dt_bias
        )
        state = torch.zeros(
            shape.value_heads, shape.value_dim, shape.key_dim, device=x.device, dtype=torch.float32
        )
        out, _ = reference_delta_rule(inputs, state, shape)
        normed = reference_gated_norm(out, z, module.norm.weight, module.norm.variance_epsilon)
        projected: Tensor = module.out_proj(normed.flatten(1))
        return projected

    def _parts(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Channels (T, C), gates (T, value_heads, value_dim), b and a (T, value_heads)."""
        shape, found = self.shape, [linear(hidden) for linear in self.projections]
        heads = shape.value_heads, shape.value_dim
        if not self.grouped:
            x, z, b, a = found
            return x, z.unflatten(1, heads), b, a
        values = shape.group * shape.value_dim
        groups = found[0].unflatten(1, (shape.key_heads, -1))
        q, k, v, z = groups.split((shape.key_dim, shape.key_dim, values, values), dim=2)
        b, a = (part.flatten(1) for part in found[1].unflatten(1, (shape.key_heads, -1)).chunk(2, dim=2))
        x = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
        return x, z.flatten(1).unflatten(1, heads), b, a
