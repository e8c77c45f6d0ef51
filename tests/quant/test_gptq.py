"""GPTQ of many experts against the textbook loop, one matrix at a time in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gptq_reference import (
    activations,
    column_order,
    rows_apart,
    second_moments,
    textbook_codes,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from localmoe.kernels.codes import dequantize, quantize_rtn, search_scales
from localmoe.quant.gptq import QuantizedExperts, gptq_quantize
from localmoe.quant.hessian import HessianSums

BITS = (2, 3, 4, 8)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def assert_textbook(
    found: QuantizedExperts,
    weight: Tensor,
    hessian: Tensor,
    *,
    act_order: bool,
    most_apart: int,
    shrinkage: float = 0.1,
) -> None:
    """Every expert has the reference's codes, but for near-ties in at most so many rows."""
    apart = 0
    for expert in range(weight.shape[0]):
        order = column_order(hessian[expert], act_order=act_order)
        expected, values = textbook_codes(
            weight[expert], hessian[expert], found.scales[expert], found.bits, found.group_size, order,
            found.damping[expert], shrinkage,
        )  # fmt: skip
        apart += rows_apart(found.codes[expert], expected, values, order)
    assert apart <= most_apart


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("features", "group_size"), [(256, 128), (200, 128), (96, 32), (150, 32), (40, 128)])
@pytest.mark.parametrize("bits", BITS)
def test_codes_are_those_of_the_textbook_loop(
    bits: int, features: int, group_size: int, act_order: bool
) -> None:
    weight = weights(3, 32, features, seed=bits)
    hessian = second_moments(activations(3, 400, features, seed=bits))
    found = gptq_quantize(weight, hessian, bits, group_size, act_order=act_order)
    padded = -(-features // group_size) * group_size
    assert found.codes.shape == (3, 32, padded) and found.codes.dtype == torch.uint8
    assert found.damping == (0.01, 0.01, 0.01) and found.rounded == ()
    assert (found.codes[:, :, features:] == 2 ** (bits - 1)).all()
    assert int(found.codes.max()) < 2**bits
    assert_textbook(found, weight, hessian, act_order=act_order, most_apart=3)
    nearest = torch.stack([quantize_rtn(matrix, bits, group_size).codes for matrix in weight])
    assert (nearest != found.codes).float().mean() > 0.02  # feedback did something


shapes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 70))


@given(
    shapes, st.sampled_from(BITS), st.sampled_from([2, 16, 32, 128]), st.booleans(), st.sampled_from(FLOATS),
    st.integers(1, 80), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=60)
def test_any_shape_dtype_and_block_gives_the_textbook_codes(
    shape: tuple[int, int, int], bits: int, group_size: int, act_order: bool, dtype: torch.dtype, block: int,
    seed: int,
) -> None:  # fmt: skip
    experts, rows, features = shape
    weight = weights(experts, rows, features, seed).to(dtype)
    hessian = second_moments(activations(experts, 2 * features, features, seed))
    found = gptq_quantize(
        weight, hessian, bits, group_size, act_order=act_order, block=block, damping=0.02, shrinkage=0
    )
    assert_textbook(
        found, weight, hessian, act_order=act_order, most_apart=experts * rows // 3 + 1, shrinkage=0
    )


@pytest.mark.parametrize("bits", BITS)
def test_all_experts_at_once_are_quantised_like_each_alone(bits: int) -> None:
    weight = weights(5, 48, 160, seed=0)
    hessian = second_moments(activations(5, 300, 160, seed=0))
    together = gptq_quantize(weight, hessian, bits, 64)
    for expert in range(5):
        alone = gptq_quantize(weight[expert : expert + 1], hessian[expert : expert + 1], bits, 64)
        assert torch.equal(alone.scales[0], together.scales[expert])
        order = column_order(hessian[expert], act_order=True)
        # the sums of a batched product may be ordered otherwise; where the codes part there was a near-tie
        _, values = textbook_codes(weight[expert], hessian[expert], alone.scales[0], bits, 64, order)
        assert rows_apart(together.codes[expert], alone.codes[0][:, order].double(), values, order) <= 1


def test_a_second_run_gives_the_same_bits() -> None:
    weight, hessian = weights(3, 40, 200, 1), second_moments(activations(3, 300, 200, 1))
    first, second = (gptq_quantize(weight, hessian, 4, 128) for _ in range(2))
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)


def test_it_does_not_depend_on_a_default_that_other_threads_change() -> None:
    weight, rows = weights(2, 16, 64, seed=1), torch.randn(40, 64)
    found = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)  # as transformers does while it builds a model
        try:
            sums = HessianSums.zeros(2, 64, "cpu")
            for expert in range(2):
                sums.add(expert, rows)
            found.append((sums.sums, gptq_quantize(weight, sums.sums, 4, 32).codes))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_one_hessian_serves_all_experts() -> None:
    weight, hessian = weights(4, 16, 96, 2), second_moments(activations(1, 300, 96, 2))
    found = gptq_quantize(weight, hessian, 3, 32)
    assert found.num_experts == 4 and len(found.damping) == 4
    assert_textbook(found, weight, hessian.expand(4, -1, -1), act_order=True, most_apart=1)


def test_codes_do_not_depend_on_the_size_of_the_hessian() -> None:
    weight, hessian = weights(2, 32, 128, 3), second_moments(activations(2, 300, 128, 3))
    found = gptq_quantize(weight, hessian, 4, 64)
    for factor in (2.0**-100, 2.0**20):  # exact in float32
        assert torch.equal(gptq_quantize(weight, hessian * factor, 4, 64).codes, found.codes)


def test_scales_are_those_of_the_original_weights_in_float16() -> None:
    weight, hessian = weights(2, 8, 100, 4), second_moments(activations(2, 300, 100, 4))
    groups = functional.pad(weight, (0, 28)).view(-1, 32)
    mse = gptq_quantize(weight, hessian, 4, 32, scale_search="mse")
    assert torch.equal(mse.scales.view(-1), search_scales(groups, 4))
    largest = gptq_quantize(weight, hessian, 4, 32, scale_search="absmax")
    assert torch.equal(largest.scales.view(-1), (groups.abs().amax(1) / 7.5).half())


def test_weighted_scales_count_errors_by_what_they_cost() -> None:
    """Uncorrelated inputs: a column's error costs its own diagonal, damped, whatever the order."""
    weight = weights(2, 8, 96, 5)
    diagonal = torch.rand(2, 96, generator=torch.Generator().manual_seed(5)) + 0.1
    found = gptq_quantize(weight, torch.diag_embed(diagonal), 2, 32)
    cost = 1.1 * diagonal + 0.01 * diagonal.mean(1, keepdim=True)
    for expert in range(2):
        groups = weight[expert].view(8, 3, 32)
        expected = search_scales(groups.reshape(-1, 32), 2, cost[expert].view(3, 32).repeat(8, 1))
        torch.testing.assert_close(found.scales[expert].view(-1), expected, rtol=2e-3, atol=0)
    assert not torch.equal(
        found.scales, gptq_quantize(weight, torch.diag_embed(diagonal), 2, 32, scale_search="mse").scales
    )


def test_weights_and_hessians_are_left_as_they_were() -> None:
    weight, hessian = weights(2, 8, 64, 6), second_moments(activations(2, 100, 64, 6))
    before = weight.clone(), hessian.clone()
    gptq_quantize(weight, hessian, 4, 32)
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


def test_one_expert_as_a_matrix_has_the_values_of_its_codes() -> None:
    weight, hessian = weights(2, 6, 70, 7), second_moments(activations(2, 200, 70, 7))
    found = gptq_quantize(weight, hessian, 3, 32)
    values = (found.codes[1].double() - 4).view(6, 3, 32) * found.scales[1].double()[..., None]
    assert torch.equal(dequantize(found.matrix(1), torch.float64), values.view(6, 96)[:, :70])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", BITS)
def test_a_gpu_finds_the_textbook_codes_too(bits: int) -> None:
    weight, hessian = weights(3, 64, 300, bits), second_moments(activations(3, 900, 300, bits))
    found = gptq_quantize(weight.cuda(), hessian.cuda(), bits, 64)
    found = replace(found, codes=found.codes.cpu(), scales=found.scales.cpu())
    assert_textbook(found, weight, hessian, act_order=True, most_apart=6)


@pytest.mark.parametrize("search", ["mse", "absmax", "weighted-mse"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_a_weight_that_no_scale_can_hold_is_refused(bad: float, search: str) -> None:
    weight = weights(2, 4, 32, 8)
    weight[1, 2, 3] = bad
    with pytest.raises(ValueError, match="the matrix has a weight"):
        gptq_quantize(weight, torch.eye(32)[None], 4, 32, scale_search=search)


@pytest.mark.parametrize(("bits", "group_size", "word"), [(5, 32, "5 bits"), (4, 7, "even")])
def test_codes_that_there_are_none_of_are_refused(bits: int, group_size: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        gptq_quantize(weights(1, 4, 32, 9), torch.eye(32)[None], bits, group_size)
