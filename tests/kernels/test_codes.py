"""Low-bit matrices against plain loops and float64: scales, rounding to nearest, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.codes import BITS, CodeMatrix, dequantize, quantize_rtn, search_scales

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gaussian(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """float64 (groups, size): the nearest -2^(bits-1)..2^(bits-1)-1 times each group's fp16 scale."""
    stored = scales.half().double()[:, None]
    half = 2 ** (bits - 1)
    return (weight.double() / stored).round().clamp(-half, half - 1) * stored


def squared_error(weight: Tensor, scales: Tensor, bits: int = 4) -> float:
    return float(((rounded(weight, scales, bits) - weight.double()) ** 2).sum())


def loop_values(matrix: CodeMatrix) -> np.ndarray:
    """W in float64, element by element from the documented layout."""
    codes, scales = matrix.codes.numpy(), matrix.scales.numpy()
    values = np.full((codes.shape[0], matrix.in_features), np.nan)
    for row in range(values.shape[0]):
        for column in range(matrix.in_features):
            feature = column if matrix.columns is None else int(matrix.columns[column])
            value = int(codes[row, column]) - 2 ** (matrix.bits - 1)
            values[row, feature] = value * float(scales[row, column // matrix.group_size])
    return values


shapes = st.tuples(st.integers(1, 6), st.integers(1, 40), st.sampled_from([2, 4, 6, 8, 16]))
bit_widths = st.sampled_from(BITS)


@given(shapes, bit_widths, st.sampled_from(FLOATS), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=60)
def test_dequantised_values_follow_the_documented_layout(
    shape: tuple[int, int, int], bits: int, dtype: torch.dtype, shuffled: bool, seed: int
) -> None:
    rows, columns, group_size = shape
    matrix = quantize_rtn(gaussian(rows, columns, seed).to(dtype), bits, group_size)
    if shuffled:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
        matrix = CodeMatrix(matrix.codes, matrix.scales, columns, group_size, bits, order)
    np.testing.assert_allclose(dequantize(matrix, torch.float64).numpy(), loop_values(matrix), rtol=1e-6)
    assert matrix.codes.shape == (rows, -(-columns // group_size) * group_size)
    assert matrix.scales.shape == (rows, -(-columns // group_size))
    assert int(matrix.codes.max()) < 2**bits


@given(shapes, bit_widths, st.integers(0, 10**6), st.floats(-3, 3))
@settings(max_examples=100)
def test_no_matrix_is_rounded_worse_than_with_its_maximum_on_the_last_code(
    shape: tuple[int, int, int], bits: int, seed: int, exponent: float
) -> None:
    rows, columns, group_size = shape
    weight = gaussian(rows, columns, seed, scale=10**exponent)
    padded = torch.nn.functional.pad(weight, (0, -columns % group_size)).view(-1, group_size)
    plain = squared_error(padded, padded.abs().amax(-1) / (2 ** (bits - 1) - 1), bits)
    found = dequantize(quantize_rtn(weight, bits, group_size), torch.float64)
    # either scale's fp16 rounding: relative, or half a step of the smallest numbers
    slack = 1e-6 * float((weight.double() ** 2).sum()) + weight.numel() * (2**bits * 2**-25) ** 2
    assert float(((found - weight.double()) ** 2).sum()) <= plain * 1.005 + slack


@pytest.mark.parametrize("bits", BITS)
def test_every_element_takes_the_nearest_code_of_its_scale(bits: int) -> None:
    weight = gaussian(16, 256)
    matrix = quantize_rtn(weight, bits, 64)
    scales = matrix.scales.double().repeat_interleave(64, dim=1)
    half = 2 ** (bits - 1)
    nearest = (weight.double() / scales).round().clamp(-half, half - 1) + half
    # float32 and float64 may part on a tie only
    assert (nearest != matrix.codes).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("bits", "gain", "near"), [(2, 0.3, 1.04), (3, 0.55, 1.03), (4, 0.72, 1.03), (8, 0.94, 1.01)]
)
def test_scale_search_beats_plain_maximum_scales_on_gaussian_matrices(
    bits: int, gain: float, near: float
) -> None:
    weight = gaussian(256, 512, bits)
    groups, half = weight.view(-1, 128), 2 ** (bits - 1)
    largest = groups.abs().amax(-1)
    found = squared_error(groups, search_scales(groups, bits), bits)
    assert found < gain * squared_error(groups, largest / (half - 1), bits)
    # close to the best scale of either sign on a fine grid
    ratios = np.linspace(0.8, 1.75 if bits > 2 else 2.5, 120) * half
    candidates = [sign * largest / ratio for ratio in ratios for sign in (1, -1)]
    errors = [((rounded(groups, scale, bits) - groups.double()) ** 2).sum(-1) for scale in candidates]
    assert found < near * float(torch.stack(errors).amin(0).sum())


@pytest.mark.parametrize("bits", BITS)
def test_weighted_search_lowers_the_weighted_error(bits: int) -> None:
    groups = gaussian(500, 64, seed=bits)
    weights = torch.rand(64, generator=torch.Generator().manual_seed(1)) ** 8
    plain, weighted = search_scales(groups, bits), search_scales(groups, bits, weights)
    errors = [
        float(((rounded(groups, scale, bits) - groups.double()) ** 2 * weights).sum())
        for scale in (plain, weighted)
    ]
    assert errors[1] < (0.9 if bits < 8 else 1) * errors[0]
    assert torch.equal(search_scales(groups, bits, torch.full((64,), 3.0)), plain)


def test_importances_of_zero_count_every_weight_alike() -> None:
    groups = gaussian(4, 32)
    weights = torch.zeros(4, 32)
    weights[3] = 1e-20
    assert torch.equal(search_scales(groups, 4, weights), search_scales(groups, 4))


def test_a_group_depends_on_its_own_weights_alone() -> None:
    weight = gaussian(64, 512)
    whole = quantize_rtn(weight)
    for row in (0, 17, 63):
        alone = quantize_rtn(weight[row : row + 1, 128:256])
        assert torch.equal(alone.codes[0], whole.codes[row, 128:256])
        assert torch.equal(alone.scales[0], whole.scales[row, 1:2])


def test_results_do_not_depend_on_how_the_matrix_is_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance = gaussian(24, 300), torch.rand(24, 300)
    whole, scales = quantize_rtn(weight, 3, 64), search_scales(weight, 3, importance)
    monkeypatch.setattr("localmoe.kernels.codes._CHUNK_ELEMENTS", 64 * 7)
    chunked = quantize_rtn(weight, 3, 64)
    assert torch.equal(chunked.codes, whole.codes) and torch.equal(chunked.scales, whole.scales)
    assert torch.equal(search_scales(weight, 3, importance), scales)


@pytest.mark.parametrize("bits", BITS)
def test_weights_that_are_codes_times_a_scale_come_back(bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    half = 2 ** (bits - 1)
    codes = torch.randint(1 - half, half, (32, 256), generator=generator).float()
    codes[:, ::128] = half - 1  # the largest lies on the last code
    weight = codes * torch.rand(32, 1, generator=generator).half().float()
    back = dequantize(quantize_rtn(weight, bits), torch.float32)
    torch.testing.assert_close(back, weight, rtol=1e-3, atol=0)


def test_the_largest_weight_sits_on_the_longer_side_of_the_codes() -> None:
    weight = torch.linspace(-0.5, 1.0, 128)[None]
    for sign in (1, -1):
        matrix = quantize_rtn(sign * weight)
        assert matrix.codes[0, -1] == 0
        assert matrix.scales.item() * sign < 0


@pytest.mark.parametrize("bits", BITS)
def test_padding_columns_are_zeros_and_vanish_again(bits: int) -> None:
    weight = gaussian(8, 2880 % 1024)
    matrix = quantize_rtn(weight, bits)
    assert (matrix.in_features, matrix.padded_features) == (832, 896)
    assert (matrix.codes[:, 832:] == 2 ** (bits - 1)).all()
    assert dequantize(matrix, torch.bfloat16).shape == (8, 832)


def test_zero_and_vanishing_groups_become_exact_zeros() -> None:
    weight = gaussian(2, 512)
    weight[0, :128] = 0
    weight[0, 128:256] = 1e-9  # its scale would vanish in float16
    weight[1, 256:384] = 1e-44  # 1 / weight overflows
    matrix = quantize_rtn(weight)
    values = dequantize(matrix, torch.float32)
    assert (values[0, :256] == 0).all() and (values[1, 256:384] == 0).all()
    assert torch.isfinite(values).all() and (matrix.scales != 0).all()


@pytest.mark.parametrize(
    ("bad", "word"),
    [(float("nan"), "NaN"), (float("inf"), "infinite"), (float("-inf"), "infinite"), (1e9, "large")],
)
def test_a_weight_that_no_scale_can_hold_is_named(bad: float, word: str) -> None:
    weight = gaussian(8, 256)
    weight[5, 200] = bad
    with pytest.raises(ValueError, match=word):
        quantize_rtn(weight)


@pytest.mark.parametrize("group_size", [0, -128, 7])
def test_a_group_size_that_is_not_even_is_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match="even"):
        quantize_rtn(gaussian(2, 32), group_size=group_size)


@pytest.mark.parametrize("bits", [1, 5, 16, 128])
def test_bits_without_codes_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits are none of 2, 3, 4, 8"):
        quantize_rtn(gaussian(2, 32), bits)


def test_a_matrix_counts_a_byte_a_code_and_moves_with_its_order() -> None:
    matrix = quantize_rtn(gaussian(128, 1024))
    assert matrix.num_bytes == 128 * 1024 + 128 * 8 * 2
    order = torch.arange(1024).flip(0)
    shuffled = CodeMatrix(matrix.codes, matrix.scales, 1024, 128, 4, order)
    assert shuffled.num_bytes == matrix.num_bytes + 8 * 1024
    assert shuffled.to("meta").columns.device.type == "meta"
