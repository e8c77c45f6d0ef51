"""Linear layers that keep their 16-bit weights give what float32 layers with the same numbers give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, tiny_model
from torch import Tensor, nn

from localmoe.model.host_linear import HostLinears, keep_linears, plain_linears, undo_linears
from localmoe.model.skeleton import model_from_config


class Recorder:
    """Multiplies in float64, and keeps how many rows it was given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: int | None = None) -> Tensor:
        assert x.dtype == torch.float32 and weight.dtype == torch.bfloat16 and x.dim() == 2
        self.rows.append(len(x))
        out = torch.zeros(rows or len(x), len(weight), dtype=torch.float64)
        out[: len(x)] = x.double() @ weight.double().T
        if bias is not None:
            out[: len(x)] += bias.double()
        return out.float()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_layer_with_weights_of_its_own_keeps_them(architecture: str) -> None:
    config = tiny_model(architecture).config
    model: Any = model_from_config(config, torch.float32, architecture)
    before = {name: weight.dtype for name, weight in model.named_parameters()}
    kept = {id(linear.weight) for linear in plain_linears(model)}
    names = {name for name, weight in model.named_parameters() if id(weight) in kept}
    keep_linears(model, torch.bfloat16)
    after = {name: weight.dtype for name, weight in model.named_parameters()}
    assert names and {name for name, dtype in after.items() if dtype == torch.bfloat16} == names
    assert not any("embed" in name or "norm" in name for name in names)
    undo_linears(model, torch.float32)
    assert {name: weight.dtype for name, weight in model.named_parameters()} == before
    assert not any("forward" in vars(module) for module in model.modules())


def layer(bias: bool = True, head: bool = False) -> tuple[nn.Module, HostLinears, nn.Linear]:
    """A module with one such layer, what it shares, and the same in float32."""
    torch.manual_seed(0)
    plain = nn.Linear(24, 10, bias=bias)
    plain.weight.data = plain.weight.data.bfloat16().float()
    module = nn.Sequential(nn.Linear(24, 10, bias=bias, device="meta"))
    module._get_dtype_plan, module.dtype = (lambda dtype: {}), torch.float32  # type: ignore[assignment]
    module.get_output_embeddings = lambda: module[0] if head else None  # type: ignore[assignment]
    shared = keep_linears(module, torch.bfloat16)
    module[0].weight = nn.Parameter(plain.weight.data.bfloat16(), requires_grad=False)
    if bias:
        module[0].bias = nn.Parameter(plain.bias.data, requires_grad=False)
    return module, shared, plain


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_the_numbers_are_those_of_a_float32_layer(bias: bool) -> None:
    module, shared, plain = layer(bias)
    x = torch.randn(2, 3, 24)
    assert torch.equal(module(x), plain(x)), "without a lane PyTorch computes it"
    shared.lane = recorder = Recorder()
    assert torch.allclose(module(x), plain(x), atol=1e-6) and recorder.rows == [6]
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert module(x[0, 0]).shape == (10,)


@pytest.mark.parametrize("head", [True, False])
@torch.inference_mode()
def test_rows_that_pad_a_pass_are_not_computed(head: bool) -> None:
    """A head is given the last rows alone; what else has fewer rows is not of the pass's tokens."""
    module, shared, plain = layer(head=head)
    shared.lane = recorder = Recorder()
    shared.begin_pass(rows=8, padding=3)
    for rows, computed in ((8, 5), (4, 1 if head else 4), (6, 3 if head else 6)):
        x = torch.randn(1, rows, 24)
        out = module(x)
        assert out.shape == (1, rows, 10) and recorder.rows[-1] == computed
        assert torch.allclose(out[:, :computed], plain(x[:, :computed]), atol=1e-6)
        assert not out[:, computed:].any()
    shared.begin_pass(rows=1, padding=0)
    assert module(torch.randn(1, 1, 24)).any() and recorder.rows[-1] == 1
