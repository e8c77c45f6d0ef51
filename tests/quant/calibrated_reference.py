"""One layer's experts for calibration, and what a calibration should find, pair by pair in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gptq_reference import activations
from torch import Tensor

from localmoe.core.draft_config import GptqSettings
from localmoe.kernels.codes import CodeMatrix, dequantize
from localmoe.quant.calibrated_layer import HELD_OUT_PRIOR, LayerTokens

HIDDEN, INTER, EXPERTS, TOP_K, GROUP = 32, 24, 6, 2, 16
UNASKED, HELD_OUT_ONLY = 3, 4  # experts that no token chose, and that only held-out tokens chose


@dataclass(frozen=True)
class Layer:
    """Random experts: gate_up (E, 2I, H), down (E, H, I), and biases, which make gate and up alternate."""

    gate_ups: Tensor
    downs: Tensor
    biases: tuple[Tensor, Tensor] | None = None

    @property
    def num_experts(self) -> int:
        return self.gate_ups.shape[0]

    def gate_up(self, expert: int) -> Tensor:
        return self.gate_ups[expert]

    def down(self, expert: int) -> Tensor:
        return self.downs[expert]

    def activate(self, expert: int, product: Tensor) -> Tensor:
        if self.biases is None:
            gate, up = product.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        product = product + self.biases[0][expert].to(product)
        gate, up = product[..., 0::2], product[..., 1::2]
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    def finish(self, expert: int, product: Tensor) -> Tensor:
        return product if self.biases is None else product + self.biases[1][expert].to(product)


def random_layer(seed: int = 0, *, biased: bool = False) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    biases = None
    if biased:
        biases = normal(EXPERTS, 2 * INTER, scale=0.5), normal(EXPERTS, HIDDEN, scale=0.5)
    return Layer(
        normal(EXPERTS, 2 * INTER, HIDDEN, scale=0.2), normal(EXPERTS, HIDDEN, INTER, scale=0.2), biases
    )


def random_tokens(count: int = 240, held_out: int = 80, seed: int = 0) -> LayerTokens:
    """Correlated inputs, two experts a token; see UNASKED and HELD_OUT_ONLY."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, EXPERTS, generator=generator)
    scores[:, UNASKED] = -1
    scores[: count - held_out, HELD_OUT_ONLY] = -1
    chosen = scores.topk(TOP_K)
    return LayerTokens(activations(1, count, HIDDEN, seed)[0], chosen.indices, chosen.values, held_out)


def pairs_of(tokens: LayerTokens, expert: int, *, held_out: bool) -> list[tuple[int, float]]:
    """(token, router weight) of the pairs that chose an expert."""
    first = tokens.num_calibrating
    rows = range(first, tokens.hidden.shape[0]) if held_out else range(first)
    return [
        (token, float(tokens.weights[token, k]))
        for token in rows
        for k in range(tokens.index.shape[1])
        if int(tokens.index[token, k]) == expert
    ]


def mixed_mean(rows: list[Tensor], weights: list[float], prior: list[Tensor], prior_tokens: float) -> Tensor:
    """(n H + n0 P) / (n + n0): H of `rows` weighted, n their effective number, P of the rows `prior`."""
    outer = sum((torch.outer(row, row) for row in prior), torch.zeros(1, dtype=torch.float64)) / len(prior)
    if not rows:
        return outer
    total, squares = sum(weights), sum(w * w for w in weights)
    own = sum(w * torch.outer(row, row) for row, w in zip(rows, weights, strict=True)) / total
    count = total * total / squares
    return (count * own + prior_tokens * outer) / (count + prior_tokens)


def expected_hessian(
    layer: Layer,
    tokens: LayerTokens,
    settings: GptqSettings,
    expert: int,
    quantised: CodeMatrix | None,
    *,
    held_out: bool,
) -> Tensor:
    """Of gate_up, or, with the quantised gate_up, of down; that GPTQ is given, or that judges."""

    def fed(token: int) -> Tensor:
        x = tokens.hidden[token].double()
        return x if quantised is None else layer.activate(expert, dequantize(quantised, torch.float64) @ x)

    pairs = pairs_of(tokens, expert, held_out=held_out)
    weights = [weight**2 if settings.gate_weighted else 1.0 for _, weight in pairs]
    features = HIDDEN if quantised is None else INTER
    first = tokens.num_calibrating
    prior = range(first, tokens.hidden.shape[0]) if held_out else range(first)
    strength = HELD_OUT_PRIOR if held_out else features
    return mixed_mean([fed(token) for token, _ in pairs], weights, [fed(token) for token in prior], strength)


def expected_outputs(layer: Layer, tokens: LayerTokens, experts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """float64 (T, H) of (gate_up, down) of each expert."""
    out = torch.zeros(tokens.hidden.shape, dtype=torch.float64)
    for token in range(tokens.hidden.shape[0]):
        for expert, weight in zip(tokens.index[token].tolist(), tokens.weights[token].tolist(), strict=True):
            gate_up, down = experts[expert]
            inner = layer.activate(expert, gate_up.double() @ tokens.hidden[token].double())
            out[token] += weight * layer.finish(expert, down.double() @ inner)
    return out


def relative_error(weight: Tensor, quantised: Tensor, hessian: Tensor) -> float:
    """Squared output error over the squared output, in float64."""
    weight, error = weight.double(), quantised.double() - weight.double()
    size = ((weight @ hessian) * weight).sum()
    return float(((error @ hessian) * error).sum() / size)
