"""The low-bit experts of one MoE layer as the GPU's kernels want them. Reads and quantises nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.kernels.lowbit import LowBitExperts
from localmoe.model.skeleton import ExpertsModule


def empty_layer(
    experts: ExpertsModule, num_experts: int, bits: int, group_size: int, device: torch.device
) -> LowBitExperts:
    """Room for a layer's experts, with the module's own biases in the kernels' order.

    Raises:
        DraftError: there is no kernel for that many bits or groups of that size.
    """
    module, layout = experts.module, experts.layout
    inner, hidden = layout.down_shape if layout.transposed else layout.down_shape[::-1]
    gate_up_bias: Tensor | None = getattr(module, "gate_up_proj_bias", None)
    if gate_up_bias is not None and not module.is_concatenated:
        gate_up_bias = torch.cat([gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]], dim=1)
    return LowBitExperts.empty(
        num_experts,
        hidden,
        inner,
        bits,
        group_size,
        device,
        gate_up_bias=gate_up_bias,
        down_bias=getattr(module, "down_proj_bias", None),
    )
