"""The low-bit experts of one MoE layer as the GPU's kernels want them. Reads and quantises nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from localmoe.kernels.codes import CodeMatrix
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.model.expert_module import expert_biases
from localmoe.model.skeleton import ExpertsModule


def empty_layer(
    experts: ExpertsModule,
    num_experts: int,
    bits: int,
    group_size: int,
    device: torch.device,
    *,
    indexed: bool = False,
    codebook: bool = False,
) -> LowBitExperts:
    """Room for a layer's experts, with copies of the module's own biases in the kernels' order.

    Args:
        indexed: whether gate_up may have its columns in an order of its own.
        codebook: whether codes stand for the values of a table.

    Raises:
        DraftError: there is no kernel for that many bits or groups of that size.
    """
    module, layout = experts.module, experts.layout
    inner, hidden = layout.down_shape if layout.transposed else layout.down_shape[::-1]
    gate_up_bias, down_bias = expert_biases(module)
    if gate_up_bias is not None:
        alternate = layout.gated and not module.is_concatenated
        parts = (gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]) if alternate else (gate_up_bias,)
        gate_up_bias = torch.cat(parts, dim=1).detach()
    return LowBitExperts.empty(
        num_experts,
        hidden,
        inner,
        bits,
        group_size,
        device,
        gated=layout.gated,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        indexed=indexed,
        codebook=codebook,
    )


def set_expert(layer: LowBitExperts, expert: int, gate_up: CodeMatrix, down: CodeMatrix) -> None:
    """Fill one expert of an empty layer: gate_up with rows [gate; up], and down.

    Where down has its columns in an order of its own, gate and up compute the hidden values in that order,
    which costs nothing.
    """
    if down.columns is not None:
        inner = down.in_features
        rows = torch.cat([down.columns, down.columns + inner]) if layer.gated else down.columns
        gate_up = replace(gate_up, codes=gate_up.codes[rows], scales=gate_up.scales[rows])
        if layer.gate_up_bias is not None:
            layer.gate_up_bias[expert] = layer.gate_up_bias[expert, rows.to(layer.gate_up_bias.device)]
        down = replace(down, columns=None)
    layer.set_expert(expert, gate_up, down)
