"""What transformers calls the parameters of a fused experts module, with a gate and without. Changes none."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from localmoe.kernels.activations import has_gate


def weight_names(module: Any) -> tuple[str, str]:
    """Names of gate_up's weight, or without a gate up's, and of down's."""
    return ("gate_up_proj" if has_gate(module) else "up_proj"), "down_proj"


def expert_biases(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Their biases, (E, 2I) or (E, I), and (E, H), as far as there are any."""
    first, down = (getattr(module, f"{name}_bias", None) for name in weight_names(module))
    return first, down
