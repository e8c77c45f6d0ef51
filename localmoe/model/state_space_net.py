"""The state space of Mamba-2 in a transformers model: found by the names of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.recurrent_shapes import ScanShape
from localmoe.kernels.state_space import reference_group_norm, reference_space_inputs, reference_state_space

_SIZES = ("n_groups", "num_heads", "ssm_state_size", "head_dim", "conv_kernel_size")
_RATES = ("A_log", "D", "dt_bias")
_SMALL_HIDDEN, _SMALL_STATE, _SMALL_VALUE, _SMALL_CHUNK = 32, 32, 16, 4


@dataclass(frozen=True, slots=True)
class StateSpaceNet:
    """A module of a decoder layer: projects to a gate, to x, B and C, and to a step a head.

    Steps keep within their limits in every pass; transformers' own code minds these in passes of several
    tokens alone.
    """

    module: Any
    shape: ScanShape

    @classmethod
    def of(cls, module: nn.Module) -> StateSpaceNet | None:
        """None where the module has other parts."""
        sizes = [getattr(module, name, None) for name in _SIZES]
        convolution, norm = getattr(module, "conv1d", None), getattr(module, "norm", None)
        if not all(type(size) is int for size in sizes) or getattr(module, "activation", "") != "silu":
            return None
        if not all(isinstance(getattr(module, name, None), nn.Linear) for name in ("in_proj", "out_proj")):
            return None
        if not isinstance(convolution, nn.Conv1d) or not hasattr(norm, "variance_epsilon"):
            return None
        if not all(isinstance(getattr(module, name, None), nn.Parameter) for name in _RATES):
            return None
        limits = getattr(module, "time_step_limit", None)
        if not isinstance(limits, tuple | list) or len(limits) != 2:
            return None
        groups, heads, state, head, taps = sizes
        shape = ScanShape(groups, heads, state, head, taps, rule="sum")  # type: ignore[arg-type]
        if not shape.fits:
            return None
        made: Any = module
        if made.in_proj.out_features != shape.values + shape.channels + shape.value_heads:
            return None
        return cls(module, shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that are alike."""
        return self.shape, self.limits, self.module.conv1d.bias is None

    @property
    def projections(self) -> list[nn.Linear]:
        """Of its input."""
        return [self.module.in_proj]

    @property
    def limits(self) -> tuple[float, float]:
        """Between which a step lies."""
        least, most = self.module.time_step_limit
        return float(least), float(most)

    def small_sizes(self) -> dict[str, Any]:
        """Of a configuration that makes a small one, in either of the names that are in use."""
        groups = min(2, self.shape.key_heads)
        heads = groups * _SMALL_HIDDEN // _SMALL_VALUE
        names = {
            ("mamba_n_heads", "mamba_num_heads"): heads,
            ("mamba_d_head", "mamba_head_dim"): _SMALL_VALUE,
            ("mamba_d_state", "ssm_state_size"): _SMALL_STATE,
            ("mamba_n_groups", "n_groups"): groups,
            ("mamba_expand", "expand"): groups,
            ("mamba_chunk_size", "chunk_size"): _SMALL_CHUNK,
        }
        return {"hidden_size": _SMALL_HIDDEN} | {name: size for both, size in names.items() for name in both}

    def parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate (T, values), channels (T, C) and steps (T, heads), views of what it projects to."""
        shape = self.shape
        gate, x, dt = projected.split((shape.values, shape.channels, shape.value_heads), dim=1)
        return gate, x, dt

    def reference(self, hidden: Tensor) -> Tensor:
        """(T, H) -> (T, H) of a text that begins with it."""
        module, shape = self.module, self.shape
        gate, x, dt = self.parts(module.in_proj(hidden))
        before = x.new_zeros(shape.taps - 1, shape.channels)
        weight, bias = module.conv1d.weight[:, 0], module.conv1d.bias
        rates = module.A_log, module.dt_bias
        inputs = reference_space_inputs(x, before, weight, bias, dt, *rates, self.limits)
        state = torch.zeros(
            shape.value_heads, shape.value_dim, shape.key_dim, device=x.device, dtype=torch.float32
        )
        out, _ = reference_state_space(inputs, module.D, state, shape)
        norm = module.norm
        normed = reference_group_norm(
            out.flatten(1), gate, norm.weight, shape.key_heads, norm.variance_epsilon
        )
        projected: Tensor = module.out_proj(normed)
        return projected
