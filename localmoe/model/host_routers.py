"""Routers on the CPU whose products the lane computes, so that what they choose for a token does not depend
on the tokens beside it. Knows no architecture by name: a router calls F.linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localmoe.model.host_linear import RowProducts
from localmoe.model.rebound import looked_up, rebind


class _Functional:
    """torch.nn.functional with another `linear`."""

    def __init__(self, lane: RowProducts) -> None:
        self._lane = lane

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As F.linear."""
        tensors = (x, weight) if bias is None else (x, weight, bias)
        alike = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        if not alike or x.dim() != 2 or not weight.is_contiguous():
            return F.linear(x, weight, bias)
        return self._lane.dense(x, weight, bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


def route_with(model: nn.Module, lane: RowProducts) -> None:
    """Have a model's routers multiply by `lane` from now on; see model.uninstall."""
    functional = _Functional(lane)
    for module in model.modules():
        if "Router" in type(module).__name__ and looked_up(module, "F") is F:
            rebind(module, "F", functional)
