"""Gated activations against the formulas written out, and their detection on transformers' own modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.tiny_models import ARCHITECTURES, UNGATED_ARCHITECTURE, tiny_model
from torch import Tensor

from localmoe.kernels.activations import (
    PLAIN_KINDS,
    Activation,
    ActivationKind,
    detect_activation,
    inner_function,
)

KINDS: tuple[ActivationKind, ...] = (*PLAIN_KINDS, "swiglu_oai")


def scalar_formula(kind: str, alpha: float, limit: float, gate: float, up: float) -> float:
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    if kind == "swiglu_oai":
        return gate / (1 + math.exp(-alpha * gate)) * (up + 1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (
        up
        * {
            "silu": gate / (1 + math.exp(-gate)),
            "relu": max(gate, 0.0),
            "gelu": gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))),
            "gelu_tanh": gate * 0.5 * (1 + math.tanh(inner)),
        }[kind]
    )


@pytest.mark.parametrize("limit", [math.inf, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_compute_their_formula(kind: ActivationKind, limit: float) -> None:
    gate, up = torch.randn(2, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
    got = Activation(kind, 1.3, limit).apply(gate, up)
    wanted = [scalar_formula(kind, 1.3, limit, g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_module_row_order_is_undone_by_split() -> None:
    rows = torch.arange(8.0)[None]
    gate, up = Activation("silu", interleaved=True).split(rows)
    assert (gate.tolist(), up.tolist()) == ([[0, 2, 4, 6]], [[1, 3, 5, 7]])
    gate, up = Activation("silu").split(rows)
    assert (gate.tolist(), up.tolist()) == ([[0, 1, 2, 3]], [[4, 5, 6, 7]])


def experts_of(architecture: str) -> torch.nn.Module:
    return next(m for m in tiny_model(architecture).modules() if hasattr(m, "_apply_gate"))


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt_oss"])
def test_the_usual_architectures_use_plain_silu(architecture: str) -> None:
    assert detect_activation(experts_of(architecture)) == Activation("silu")


def test_gpt_oss_is_found_with_its_alpha_clamp_and_layout() -> None:
    experts = experts_of("gpt_oss")
    assert detect_activation(experts) == Activation("swiglu_oai", 1.702, 7.0, interleaved=True)
    experts.limit = 3.25
    experts.alpha = 1.25
    assert detect_activation(experts) == Activation("swiglu_oai", 1.25, 3.25, interleaved=True)


def module(gate: Callable[[Tensor], Tensor]) -> SimpleNamespace:
    return SimpleNamespace(_apply_gate=gate)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("limit", [math.inf, 7.0, 1.5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_is_recognised(kind: ActivationKind, limit: float, interleaved: bool) -> None:
    alpha = 1.1 if kind == "swiglu_oai" else 1.702
    wanted = Activation(kind, alpha, limit, interleaved)
    assert detect_activation(module(lambda x: wanted.apply(*wanted.split(x)))) == wanted


@pytest.mark.parametrize(("name", "kind"), [("gelu_new", "gelu_tanh"), ("gelu", "gelu"), ("relu", "relu")])
def test_other_functions_of_transformers_are_told_apart(name: str, kind: ActivationKind) -> None:
    act = transformers.activations.ACT2FN[name]
    found = detect_activation(module(lambda x: act(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]))
    assert found == Activation(kind)


def test_what_has_no_gate_is_recognised_by_its_activation_and_rounds_as_it_does() -> None:
    experts = experts_of(UNGATED_ARCHITECTURE)
    found = detect_activation(experts)
    assert found == Activation("relu", gated=False)
    both = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).bfloat16() * 3
    assert torch.equal(found.apply(*found.split(both)), inner_function(experts)(both))


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_an_activation_without_a_gate_that_no_kernel_knows_is_not_guessed(name: str) -> None:
    act = transformers.activations.ACT2FN[name]
    assert detect_activation(SimpleNamespace(has_gate=False, act_fn=act, _apply_gate=refuse)) is None


def refuse(x: Tensor) -> Tensor:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "gate",
    [
        lambda x: torch.tanh(x[:, :8]) * x[:, 8:],
        lambda x: torch.nn.functional.silu(x[:, :8]) * x[:, 8:] * 1.001,
        lambda x: torch.nn.functional.silu(x[:, :8]).clamp(max=2.0) * x[:, 8:].clamp(-2.0, 2.0),
        lambda x: torch.nn.functional.silu(x[:, 8:]) * x[:, :8],
        lambda x: x,
        lambda x: torch.full((x.shape[0], x.shape[1] // 2), math.nan),
        refuse,
    ],
)
def test_what_matches_no_activation_is_not_guessed(gate: Callable[[Tensor], Tensor]) -> None:
    assert detect_activation(module(gate)) is None


def test_a_module_without_a_gate_has_no_activation() -> None:
    assert detect_activation(torch.nn.Linear(2, 2)) is None


def test_a_module_that_insists_on_its_width_is_tried_with_it() -> None:
    def gate(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x[:, :96]) * x[:, 96:].view(-1, 96)

    assert detect_activation(module(gate)) is None
    assert detect_activation(module(gate), intermediate_size=96) == Activation("silu")
