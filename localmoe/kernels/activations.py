"""Activations of expert MLPs: what act(gate) * up is, and which one a transformers module applies.

Measures a module by what it computes, never by its name. Decides nothing about where it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"]

PLAIN_KINDS: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu")
_FAR = 2.0**20  # an up value that every clamp in use cuts
_TOLERANCE = 2e-5  # float32 versions of one formula differ by 1e-6, gelu and its tanh form by 5e-4


@dataclass(frozen=True, slots=True)
class Activation:
    """act(gate) * up, or GPT-OSS's gate * sigmoid(alpha * gate) * (up + 1).

    Attributes:
        alpha: slope of the sigmoid of "swiglu_oai"; other kinds do not use it.
        limit: gate is first clamped to at most `limit` and up to +-`limit`; infinite means no clamp.
        interleaved: rows of the module's own gate_up are gate, up, gate, up, ... rather than [gate; up].
        gated: False where the first matrix has I rows instead of 2I, each of which is gate and up at once:
            of "relu" that makes the square of relu.
    """

    kind: ActivationKind
    alpha: float = 1.702
    limit: float = math.inf
    interleaved: bool = False
    gated: bool = True

    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up, elementwise in the tensors' own dtype."""
        if self.limit != math.inf:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        if self.kind == "swiglu_oai":
            return gate * torch.sigmoid(gate * self.alpha) * (up + 1)
        if self.kind == "silu":
            return F.silu(gate) * up
        if self.kind == "relu":
            return F.relu(gate) * up
        return F.gelu(gate, approximate="tanh" if self.kind == "gelu_tanh" else "none") * up

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """gate and up (..., I) of the module's own gate_up (..., 2I); without a gate of (..., I), twice."""
        if not self.gated:
            return gate_up, gate_up
        if self.interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up


def has_gate(module: Any) -> bool:
    """Whether a transformers experts module has gate and up, rather than up alone."""
    return bool(getattr(module, "has_gate", True))


def inner_function(module: Any) -> Callable[[Tensor], Tensor]:
    """What such a module does between its two products: (n, 2I) -> (n, I), or without a gate (n, I) ->
    (n, I)."""
    function: Callable[[Tensor], Tensor] = module._apply_gate if has_gate(module) else module.act_fn
    return function


def detect_activation(module: Any, intermediate_size: int = 8) -> Activation | None:
    """The activation that a transformers experts module applies, found by feeding it numbers.

    The layout, the clamp and alpha are read off a few chosen points; the result must then agree with the
    module on random values of up to about three times the clamp.

    Args:
        module: anything with `_apply_gate`: (n, 2I) -> (n, I), or, if its `has_gate` is false, with `act_fn`:
            (n, I) -> (n, I). It is called with float32 on CPU.
        intermediate_size: I of the trial; only a module that insists on its own width needs another.

    Returns:
        None if no known activation in either layout agrees, or if the module refuses the trial.
    """
    generator = torch.Generator().manual_seed(0)
    rows = 2 if has_gate(module) else 1
    trial = torch.randn(4, rows * intermediate_size, generator=generator, dtype=torch.float32) * 6
    try:
        with torch.no_grad():
            wanted = inner_function(module)(trial.clone())
            if not has_gate(module):
                ungated = (Activation(kind, gated=False) for kind in PLAIN_KINDS)
                return next((known for known in ungated if _agrees(known, trial, wanted)), None)
            for interleaved in (False, True):
                for candidate in _candidates(module, intermediate_size, interleaved):
                    if _agrees(candidate, trial, wanted):
                        return candidate
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None  # the module's own code failed on a plain tensor, so nothing is known of it
    return None


def _candidates(module: Any, intermediate_size: int, interleaved: bool) -> list[Activation]:
    """Activations that fit f(gate, up) at gate 1 and up 0, 1 and very far, in this layout."""
    ups = torch.tensor([0.0, 1.0, _FAR], dtype=torch.float32)[:, None].expand(3, intermediate_size)
    gates = torch.ones(3, intermediate_size, dtype=torch.float32)
    pair = torch.stack((gates, ups), -1).flatten(1) if interleaved else torch.cat((gates, ups), 1)
    at_zero, at_one, at_far = module._apply_gate(pair.contiguous()).double()[:, 0].tolist()
    if 0 < at_zero < 1:  # the (up + 1) of swiglu_oai: f(1, 0) = sigmoid(alpha)
        alpha = _rounded(math.log(at_zero / (1 - at_zero)))
        limit = _limit(at_far / at_zero - 1)
        return [Activation("swiglu_oai", alpha, limit, interleaved)]
    limit = _limit(at_far / at_one) if at_one else math.inf
    return [Activation(kind, limit=limit, interleaved=interleaved) for kind in PLAIN_KINDS]


def _limit(measured: float) -> float:
    return math.inf if not 0 < measured < _FAR / 2 else _rounded(measured)


def _rounded(measured: float) -> float:
    """Five significant digits: what float32 measures surely, and more than configurations use."""
    return float(f"{measured:.5g}")


def _agrees(candidate: Activation, trial: Tensor, wanted: Tensor) -> bool:
    gate, up = candidate.split(trial)
    got = candidate.apply(gate, up)
    return got.shape == wanted.shape and torch.allclose(got, wanted.float(), rtol=_TOLERANCE, atol=_TOLERANCE)
