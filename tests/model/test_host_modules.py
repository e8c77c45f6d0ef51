"""What takes the place of a model's norms and routers on the CPU gives what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, tiny_model
from torch import Tensor, nn

from localmoe.model.host_norms import compile_norms
from localmoe.model.host_routers import route_with
from localmoe.model.uninstall import uninstall


class Recorder:
    """Multiplies in float64."""

    jobs = 0

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: int | None = None) -> Tensor:
        self.jobs += 1
        out = x.double() @ weight.double().T
        return (out if bias is None else out + bias.double()).float()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_a_models_logits_stay_what_they_are(architecture: str) -> None:
    model: Any = tiny_model(architecture).float()
    ids = torch.arange(1, 12)[None]
    wanted = model(ids).logits
    lane = Recorder()
    compile_norms(model)
    route_with(model, lane)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert all("forward" in vars(norm) for norm in norms)
    torch.testing.assert_close(model(ids).logits, wanted, atol=1e-4, rtol=1e-4)
    routers = [module for module in model.modules() if "Router" in type(module).__name__]
    jobs = 0 if architecture == "phimoe" else len(routers)  # Phi's is a linear layer by inheritance
    assert lane.jobs == jobs
    uninstall(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(ids).logits, wanted) and lane.jobs == jobs


class OtherRMSNorm(nn.Module):
    """Of another formula under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(16)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.1)


def test_a_norm_of_another_formula_keeps_its_code() -> None:
    model = nn.Sequential(OtherRMSNorm(), nn.RMSNorm(16, eps=1e-5))
    nn.init.normal_(model[1].weight)
    compile_norms(model)
    assert ["forward" in vars(module) for module in model] == [False, True]
    x = torch.randn(3, 16)
    torch.testing.assert_close(model[1](x), nn.functional.rms_norm(x, (16,), model[1].weight, 1e-5))
