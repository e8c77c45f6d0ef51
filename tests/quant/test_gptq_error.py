"""What GPTQ gains on tokens that it has not seen, and when rounding to nearest is kept instead."""

from __future__ import annotations

import pytest
import torch
from gptq_reference import activations, second_moments, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.codes import dequantize, quantize_rtn
from localmoe.quant.gptq import QuantizedExperts, gptq_quantize
from localmoe.quant.gptq_error import keep_better, output_error, output_errors


def seen_and_unseen(experts: int, seen: int, unseen: int, features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hessians of two sets of tokens of the same kind."""
    inputs = activations(experts, seen + unseen, features, seed)
    return second_moments(inputs[:, :seen]), second_moments(inputs[:, seen:])


def nearest_experts(weight: Tensor, bits: int, group_size: int) -> QuantizedExperts:
    found = [quantize_rtn(matrix, bits, group_size) for matrix in weight]
    codes, scales = (torch.stack([getattr(one, name) for one in found]) for name in ("codes", "scales"))
    return QuantizedExperts(codes, scales, weight.shape[2], group_size, bits, (0.0,) * len(found))


@given(
    st.integers(1, 8), st.integers(1, 70), st.sampled_from([2, 3, 4, 8]), st.integers(1, 50),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=30)
def test_the_error_is_that_of_the_outputs(
    rows: int, features: int, bits: int, tokens: int, seed: int
) -> None:
    weight, inputs = weights(1, rows, features, seed)[0], activations(1, tokens, features, seed)[0]
    matrix = quantize_rtn(weight, bits, 32)
    error = output_error(weight, matrix, second_moments(inputs.double()[None])[0])
    assert error.dtype == torch.float64
    low, high = zip(
        bounds(inputs, dequantize(matrix, torch.float32) - weight), bounds(inputs, weight), strict=True
    )
    assert low[0] / high[1] <= float(error)
    assert float(error) * low[1] <= high[0]


def bounds(inputs: Tensor, weight: Tensor) -> tuple[float, float]:
    """Squares of the outputs, summed: the least and the most that sums in float32 of up to 70 terms each may
    come to, where terms cancel too."""
    x, w = inputs.double(), weight.double()
    true = float((x @ w.T).square().sum())
    slack = 4e-6 * float((x.abs() @ w.abs().T).square().sum())
    return max(0.0, true - slack), true + slack


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("bits", "gain"), [(2, 0.7), (3, 0.6), (4, 0.6), (8, 0.6)])
def test_gptq_changes_the_output_less_than_rounding_to_nearest_on_unseen_tokens(
    bits: int, gain: float, act_order: bool
) -> None:
    weight = weights(3, 64, 192, bits)
    seen, unseen = seen_and_unseen(3, 2000, 1000, 192, bits)
    found = gptq_quantize(weight, seen, bits, 64, act_order=act_order)
    errors = output_errors(weight, found, unseen)
    assert errors.shape == (3,) and errors.dtype == torch.float64
    assert (errors < gain * output_errors(weight, nearest_experts(weight, bits, 64), unseen)).all()


def test_experts_are_held_against_their_own_hessian_or_a_shared_one() -> None:
    weight, hessian = weights(2, 8, 64, 0), second_moments(activations(2, 100, 64, 0))
    found = nearest_experts(weight, 3, 32)
    own = torch.stack([output_error(weight[e], found.matrix(e), hessian[e]) for e in range(2)])
    shared = torch.stack([output_error(weight[e], found.matrix(e), hessian[0]) for e in range(2)])
    assert torch.equal(output_errors(weight, found, hessian), own)
    assert torch.equal(output_errors(weight, found, hessian[:1]), shared)
    assert own[1] != shared[1]


def test_without_any_output_there_is_no_error() -> None:
    weight = weights(1, 8, 32, 0)
    assert output_errors(weight, nearest_experts(weight, 2, 32), torch.zeros(1, 32, 32)).item() == 0
    zeros = torch.zeros(1, 8, 32)
    assert output_errors(zeros, nearest_experts(zeros, 2, 32), torch.eye(32)[None]).item() == 0


def test_gptq_is_kept_where_it_is_better_and_the_nearest_codes_elsewhere() -> None:
    weight = weights(4, 32, 128, 1)
    seen, unseen = seen_and_unseen(4, 1000, 500, 128, 1)
    seen[2] = second_moments(activations(1, 1000, 128, seed=99))[0]  # of tokens of another kind
    unseen[3] = 0
    found = gptq_quantize(weight, seen, 3, 32)
    before = found.codes.clone()
    choice = keep_better(weight, found, unseen)
    nearest = nearest_experts(weight, 3, 32)
    assert choice.experts.rounded == (2, 3) and torch.equal(found.codes, before)
    for expert, expected in enumerate((found, found, nearest, nearest)):
        assert torch.equal(choice.experts.codes[expert], expected.codes[expert])
        assert torch.equal(choice.experts.scales[expert], expected.scales[expert])
    assert torch.equal(choice.gptq_errors, output_errors(weight, found, unseen))
    assert torch.equal(choice.nearest_errors, output_errors(weight, nearest, unseen))
    chosen = output_errors(weight, choice.experts, unseen)
    assert torch.equal(chosen, torch.minimum(choice.gptq_errors, choice.nearest_errors))


def test_a_shared_hessian_chooses_for_every_expert() -> None:
    weight = weights(3, 32, 128, 2)
    seen, unseen = seen_and_unseen(1, 1000, 500, 128, 2)
    found = gptq_quantize(weight, seen, 4, 32)
    assert keep_better(weight, found, unseen).experts.rounded == ()
    assert keep_better(weight, nearest_experts(weight, 4, 32), unseen).experts.rounded == (0, 1, 2)
