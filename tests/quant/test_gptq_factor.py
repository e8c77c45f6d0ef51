"""Hessians that are singular, dead, damaged or not positive definite: what GPTQ makes of them and says."""

from __future__ import annotations

import pytest
import torch
from gptq_reference import activations, second_moments, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.codes import quantize_rtn
from localmoe.quant.gptq import gptq_quantize
from localmoe.quant.gptq_factor import factorise, rounding_order


def nearest_codes(weight: Tensor, bits: int, group_size: int) -> Tensor:
    return torch.stack([quantize_rtn(matrix, bits, group_size).codes for matrix in weight])


def indefinite(features: int, lowest: float, seed: int) -> Tensor:
    """A symmetric matrix of mean diagonal 1 whose lowest eigenvalue is `lowest`."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(features, features, generator=generator, dtype=torch.float64))[0]
    values = torch.full((features,), (features - lowest) / (features - 1), dtype=torch.float64)
    values[0] = lowest
    return (basis * values @ basis.T).float()


@given(st.integers(1, 3), st.integers(1, 60), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=40)
def test_factors_multiply_back_to_the_damped_hessian(
    experts: int, features: int, act_order: bool, seed: int
) -> None:
    hessian = second_moments(activations(experts, 3 * features, features, seed))
    factors = factorise(hessian, 0.05, 0.2, act_order=act_order)
    for expert in range(experts):
        order, feedback = factors.order[expert], factors.feedback[expert].double()
        mean = hessian[expert].diagonal().double().mean()
        expected = hessian[expert].double() / mean
        expected += torch.diag(0.2 * expected.diagonal() + 0.05)
        product = feedback @ factors.importance[expert].double().diag() @ feedback.T
        torch.testing.assert_close(product, expected[order][:, order], rtol=1e-4, atol=1e-5)
        assert torch.equal(feedback.tril(), feedback) and (feedback.diagonal() == 1).all()
        assert torch.equal(order.sort().values, torch.arange(features))


def test_columns_of_large_diagonal_are_rounded_first() -> None:
    hessian = torch.diag_embed(torch.tensor([[1.0, 5.0, 3.0], [2.0, 0.0, 9.0]]))
    assert rounding_order(hessian, act_order=True).tolist() == [[0, 2, 1], [1, 0, 2]]  # the last one first
    assert rounding_order(hessian, act_order=False).tolist() == [[2, 1, 0], [2, 1, 0]]


def test_inputs_that_no_token_used_are_rounded_to_nearest_and_feed_nothing() -> None:
    weight, inputs = weights(2, 16, 128, 0), activations(2, 300, 128, 0)
    dead = torch.tensor([3, 40, 127])
    inputs[:, :, dead] = 0
    found = gptq_quantize(weight, second_moments(inputs), 4, 32, scale_search="mse")
    assert found.rounded == () and found.damping == (0.01, 0.01)
    nearest = nearest_codes(weight, 4, 32)
    assert torch.equal(found.codes[:, :, dead], nearest[:, :, dead])
    assert not torch.equal(found.codes, nearest)
    codes = []
    for value in (0.0013, 0.0054):  # their errors differ; both too small to be a group's largest weight
        weight[:, :, dead] = value
        found = gptq_quantize(weight, second_moments(inputs), 4, 32, scale_search="absmax").codes
        codes.append(torch.where(torch.isin(torch.arange(128), dead), 0, found))
    assert torch.equal(*codes)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_fewer_tokens_than_inputs_are_enough(tokens: int) -> None:
    weight, inputs = weights(2, 16, 128, 1), activations(2, tokens, 128, 1)
    found = gptq_quantize(weight, second_moments(inputs), 4, 32)
    assert found.rounded == ()
    assert int(found.codes.max()) < 16


def test_an_expert_that_saw_no_token_is_rounded_to_nearest() -> None:
    weight = weights(3, 8, 64, 2)
    hessian = second_moments(activations(3, 200, 64, 2))
    hessian[1] = 0
    for search in ("mse", "weighted-mse"):
        found = gptq_quantize(weight, hessian, 3, 32, scale_search=search)
        assert found.rounded == (1,)
        assert torch.equal(found.codes[1], nearest_codes(weight, 3, 32)[1])
        assert not torch.equal(found.codes[0], nearest_codes(weight, 3, 32)[0])


def test_damping_grows_for_the_expert_that_needs_it_and_for_no_other() -> None:
    weight = weights(4, 8, 64, 3)
    good = second_moments(activations(1, 200, 64, 3))[0]
    hessian = torch.stack([good, indefinite(64, -0.15, 0), good, indefinite(64, -3, 1)])
    found = gptq_quantize(weight, hessian, 4, 32)
    assert found.damping == pytest.approx((0.01, 0.1, 0.01, 10))
    assert found.rounded == ()
    for expert in (0, 2):
        alone = gptq_quantize(weight[expert : expert + 1], good[None], 4, 32)
        assert torch.equal(found.codes[expert], alone.codes[0])
    raised = gptq_quantize(weight[1:2], hessian[1:2], 4, 32, damping=0.1)
    assert torch.equal(found.codes[1], raised.codes[0])


@pytest.mark.parametrize("search", ["mse", "weighted-mse"])
@pytest.mark.parametrize("bad", ["nan", "inf", "one nan", "negative"])
def test_a_hessian_that_no_damping_mends_rounds_to_nearest_and_says_so(bad: str, search: str) -> None:
    weight = weights(3, 8, 64, 4)
    hessian = second_moments(activations(3, 200, 64, 4))
    sound = gptq_quantize(weight, hessian, 4, 32, scale_search=search)
    if bad == "one nan":
        hessian[1, 7, 9] = hessian[1, 9, 7] = torch.nan
    elif bad == "negative":
        hessian[1] = indefinite(64, -40, 0)
    else:
        hessian[1] = float(bad)
    found = gptq_quantize(weight, hessian, 4, 32, scale_search=search)
    assert found.rounded == (1,)
    assert torch.equal(found.codes[1], nearest_codes(weight, 4, 32)[1])
    for expert in (0, 2):
        assert torch.equal(found.codes[expert], sound.codes[expert])


def test_a_bad_hessian_for_all_rounds_all_experts() -> None:
    weight = weights(3, 8, 64, 5)
    found = gptq_quantize(weight, torch.full((1, 64, 64), torch.nan), 4, 32)
    assert found.rounded == (0, 1, 2) and torch.equal(found.codes, nearest_codes(weight, 4, 32))
