"""Sums of second moments against loops in float64: routing, weights, means, priors."""

from __future__ import annotations

import pytest
import torch
from gptq_reference import activations, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.codes import quantize_rtn
from localmoe.quant import hessian as hessian_module
from localmoe.quant.gptq import gptq_quantize
from localmoe.quant.gptq_error import output_error, output_errors
from localmoe.quant.hessian import HessianSums


def routed_tokens(
    tokens: int, features: int, experts: int, top_k: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (T, K), chosen experts (T, k), the router's weights (T, k)."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    chosen = scores.topk(top_k)
    return torch.randn(tokens, features, generator=generator), chosen.indices, chosen.values + 0.1


def loop_means(x: Tensor, index: Tensor, w: Tensor, experts: int) -> Tensor:
    """float64 (E, K, K): sum of w x x^T / sum of w, pair by pair; zeros without tokens."""
    sums = torch.zeros(experts, x.shape[1], x.shape[1], dtype=torch.float64)
    total = torch.zeros(experts, dtype=torch.float64)
    for token in range(index.shape[0]):
        for choice, expert in enumerate(index[token].tolist()):
            if 0 <= expert < experts:
                sums[expert] += w[token, choice].double() * torch.outer(x[token], x[token]).double()
                total[expert] += w[token, choice].double()
    return sums / total.clamp_min(1e-300)[:, None, None]


@given(
    st.integers(0, 40), st.integers(1, 12), st.integers(2, 7), st.integers(1, 2), st.booleans(),
    st.integers(1, 9), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=60)
def test_means_are_those_of_a_loop_over_routed_pairs(
    tokens: int, features: int, experts: int, top_k: int, gated: bool, chunk: int, seed: int
) -> None:
    x, index, router = routed_tokens(tokens, features, experts, top_k, seed)
    first, count = 1, experts - 1  # a chunk of the layer's experts
    sums = HessianSums.zeros(count, features, "cpu", first_expert=first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hessian_module, "_CHUNK_BYTES", 4 * features * chunk)
        half = tokens // 2
        for part in (slice(0, half), slice(half, tokens)):
            sums.add_routed(x[part], index[part], router[part] if gated else None)
    counts = sums.token_counts()
    w = router.square() if gated else torch.ones_like(router)
    expected = loop_means(x, index - first, w, count)
    torch.testing.assert_close(sums.take_means().double(), expected, rtol=1e-4, atol=1e-5)
    for expert in range(count):
        chosen = w[index == expert + first].double()
        effective = float(chosen.sum() ** 2 / chosen.square().sum()) if len(chosen) else 0
        assert float(counts[expert]) == pytest.approx(effective, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_of_one_expert_are_added_in_any_float_dtype(dtype: torch.dtype) -> None:
    x = activations(1, 30, 8, 0)[0].to(dtype)
    w = torch.rand(30)
    sums = HessianSums.zeros(2, 8, "cpu")
    sums.add(1, x[:20], w[:20])
    sums.add(1, x[20:], w[20:])
    sums.add(0, x)
    found = sums.take_means()
    torch.testing.assert_close(found[0], x.float().T @ x.float() / 30)
    torch.testing.assert_close(found[1], (x.float().T * w) @ x.float() / w.sum())


@pytest.mark.parametrize("gated", [True, False])
def test_means_do_not_depend_on_how_often_the_tokens_come(gated: bool) -> None:
    x, index, router = routed_tokens(50, 8, 4, 2, 0)
    means = []
    for times, size in ((1, 1.0), (3, 0.25)):
        sums = HessianSums.zeros(4, 8, "cpu")
        for _ in range(times):
            sums.add_routed(x, index, router * size if gated else None)
        means.append(sums.take_means())
    torch.testing.assert_close(means[0], means[1], rtol=1e-5, atol=1e-6)


def test_a_prior_weighs_as_many_tokens_as_it_is_told() -> None:
    x = activations(1, 30, 8, 1)[0]
    sums = HessianSums.zeros(3, 8, "cpu")
    sums.add(0, x)
    sums.add(2, x[:5], torch.full((5,), 7.0))  # five tokens, whatever their weight
    prior = torch.eye(8) * 2
    found = sums.take_means(prior, prior_tokens=10)
    own, few = x.T @ x / 30, x[:5].T @ x[:5] / 5
    torch.testing.assert_close(found[0], (30 * own + 10 * prior) / 40)
    torch.testing.assert_close(found[1], prior)
    torch.testing.assert_close(found[2], (5 * few + 10 * prior) / 15)


def test_each_expert_may_have_a_prior_of_its_own() -> None:
    x = activations(1, 30, 8, 1)[0]
    priors = torch.diag_embed(torch.rand(2, 8, generator=torch.Generator().manual_seed(0)))
    sums = HessianSums.zeros(2, 8, "cpu")
    sums.add(0, x)
    found = sums.take_means(priors, prior_tokens=15)
    torch.testing.assert_close(found[0], (2 * x.T @ x / 30 + priors[0]) / 3)
    torch.testing.assert_close(found[1], priors[1])


def test_the_usual_strength_of_a_prior_grows_with_the_inputs() -> None:
    found = []
    for strength in (None, hessian_module.PRIOR_STRENGTH * 8):
        sums = HessianSums.zeros(1, 8, "cpu")
        sums.add(0, activations(1, 30, 8, 2)[0])
        found.append(sums.take_means(torch.eye(8), strength))
    assert torch.equal(*found)


def test_an_expert_without_tokens_has_the_prior_also_at_strength_0() -> None:
    sums = HessianSums.zeros(1, 4, "cpu")
    assert torch.equal(sums.take_means(torch.eye(4), 0)[0], torch.eye(4))
    assert torch.equal(HessianSums.zeros(1, 4, "cpu").take_means(), torch.zeros(1, 4, 4))


def test_the_pooled_mean_is_over_all_tokens_of_all_experts() -> None:
    x = activations(1, 30, 8, 3)[0]
    sums = HessianSums.zeros(3, 8, "cpu")
    sums.add(0, x[:20])
    sums.add(2, x[20:])
    torch.testing.assert_close(sums.pooled_mean(), x.T @ x / 30)
    assert torch.equal(HessianSums.zeros(2, 4, "cpu").pooled_mean(), torch.zeros(4, 4))


def test_a_prior_of_many_tokens_helps_experts_that_saw_few() -> None:
    weight, inputs = weights(1, 64, 128, 0), activations(1, 4000, 128, 0)[0]
    unseen = (inputs[3000:].T @ inputs[3000:] / 1000)[None]
    prior = inputs[100:3000].T @ inputs[100:3000] / 2900
    errors = []
    for strength in (0, None):
        sums = HessianSums.zeros(1, 128, "cpu")
        sums.add(0, inputs[:60])
        found = gptq_quantize(weight, sums.take_means(prior, strength), 4, 64)
        errors.append(output_errors(weight, found, unseen).item())
    assert errors[1] < 0.8 * errors[0]
    nearest = quantize_rtn(weight[0], 4, 64)
    assert errors[1] < 0.8 * float(output_error(weight[0], nearest, unseen[0]))
