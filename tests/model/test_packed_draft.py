"""Experts of a draft in the kernels' layout: row orders and biases, whatever the module's own are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from localmoe.experts.records import RecordLayout
from localmoe.kernels.codes import dequantize, quantize_rtn
from localmoe.model.packed_draft import empty_layer, set_expert
from localmoe.model.skeleton import ExpertsModule

EXPERTS, HIDDEN, INNER = 3, 64, 32


class Biased(nn.Module):
    """The attributes of a transformers experts module that the layout depends on."""

    def __init__(self, is_concatenated: bool) -> None:
        super().__init__()
        self.is_concatenated = is_concatenated
        self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))


def module_of(is_concatenated: bool) -> ExpertsModule:
    layout = RecordLayout((2 * INNER, HIDDEN), (HIDDEN, INNER), False)
    return ExpertsModule("model.layers.0.mlp.experts", 0, Biased(is_concatenated), layout)


@pytest.mark.parametrize("is_concatenated", [True, False])
def test_an_order_of_down_becomes_one_of_gate_ups_rows_and_biases(is_concatenated: bool) -> None:
    experts = module_of(is_concatenated)
    before = experts.module.gate_up_proj_bias.detach().clone()
    layer = empty_layer(experts, EXPERTS, 4, 32, torch.device("cpu"))
    gate_up, down = (
        quantize_rtn(torch.randn(2 * INNER, HIDDEN), 4, 32),
        quantize_rtn(torch.randn(HIDDEN, INNER), 4, 32),
    )
    order = torch.randperm(INNER)
    set_expert(layer, 0, gate_up, down)
    set_expert(layer, 1, gate_up, replace(down, columns=order))
    assert layer.gate_up_bias is not None and layer.down_bias is not None
    halves = before.chunk(2, dim=1) if is_concatenated else (before[:, 0::2], before[:, 1::2])
    gate, up = dequantize(gate_up, torch.float32).chunk(2)
    for expert, rows in ((0, torch.arange(INNER)), (1, order)):
        found_up, found_down = layer.dequantize(expert)
        assert torch.equal(found_up, torch.cat([gate[rows], up[rows]]))
        assert torch.equal(found_down, dequantize(down, torch.float32))
        wanted = torch.cat([half[expert, rows] for half in halves])
        assert torch.equal(layer.gate_up_bias[expert], wanted)
    assert torch.equal(layer.gate_up_bias[2], torch.cat([half[2] for half in halves]))
    assert torch.equal(experts.module.gate_up_proj_bias, before), "the target computes with these"
    assert not layer.gate_up_bias.requires_grad
