"""Short convolutions in place of attention in a transformers model: found by the names of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from localmoe.kernels.recurrent_shapes import ConvShape
from localmoe.kernels.short_conv import reference_short_conv

_SMALL_HIDDEN = 48


@dataclass(frozen=True, slots=True)
class ShortConvNet:
    """A module of a decoder layer: projects to B, C and x."""

    module: Any
    shape: ConvShape

    @classmethod
    def of(cls, module: nn.Module) -> ShortConvNet | None:
        """None where the module has other parts."""
        convolution = getattr(module, "conv", None)
        before, behind = getattr(module, "in_proj", None), getattr(module, "out_proj", None)
        if not isinstance(convolution, nn.Conv1d) or not isinstance(before, nn.Linear):
            return None
        channels, (taps,) = convolution.in_channels, convolution.kernel_size
        alone = convolution.groups == channels == convolution.out_channels
        if not isinstance(behind, nn.Linear) or before.out_features != 3 * channels or not alone:
            return None
        shape = ConvShape(channels, taps)
        return cls(module, shape) if shape.fits else None

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that are alike."""
        return self.shape, self.module.conv.bias is None

    @property
    def projections(self) -> list[nn.Linear]:
        """Of its input."""
        return [self.module.in_proj]

    def small_sizes(self) -> dict[str, Any]:
        """Of a configuration that makes a small one."""
        return {"hidden_size": _SMALL_HIDDEN}

    def reference(self, hidden: Tensor) -> Tensor:
        """(T, H) -> (T, H) of a text that begins with it."""
        module, shape = self.module, self.shape
        before = hidden.new_zeros(shape.taps - 1, shape.channels)
        found, _ = reference_short_conv(
            module.in_proj(hidden), before, module.conv.weight[:, 0], module.conv.bias
        )
        projected: Tensor = module.out_proj(found)
        return projected
