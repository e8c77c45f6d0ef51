"""INT4 matrices against plain loops and float64: quantise, dequantise, multiply."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.int4 import Int4Linear, QuantizedMatrix, dequantize, quantize_rtn, unpack_codes

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gaussian(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def squared_error(weight: Tensor, scales: Tensor) -> float:
    """Error, in float64, of rounding (groups, size) to the nearest of -8..7 times each group's fp16 scale."""
    stored = scales.half().double()[:, None]
    codes = (weight.double() / stored).round().clamp(-8, 7)
    return float(((codes * stored - weight.double()) ** 2).sum())


def loop_values(matrix: QuantizedMatrix) -> np.ndarray:
    """W in float64, element by element from the documented layout."""
    codes, scales = matrix.codes.numpy(), matrix.scales.numpy()
    values = np.empty((codes.shape[0], matrix.in_features))
    for row in range(values.shape[0]):
        for column in range(matrix.in_features):
            byte = int(codes[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            values[row, column] = (code - 8) * float(scales[row, column // matrix.group_size])
    return values


shapes = st.tuples(st.integers(1, 6), st.integers(1, 40), st.sampled_from([2, 4, 6, 8, 16]))


@given(shapes, st.sampled_from(FLOATS), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_dequantised_values_follow_the_documented_layout(
    shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    rows, columns, group_size = shape
    matrix = quantize_rtn(gaussian(rows, columns, seed).to(dtype), group_size)
    np.testing.assert_allclose(dequantize(matrix, torch.float64).numpy(), loop_values(matrix), rtol=1e-6)
    assert matrix.codes.shape == (rows, -(-columns // group_size) * group_size // 2)
    assert matrix.scales.shape == (rows, -(-columns // group_size))


@given(shapes, st.integers(0, 10**6), st.floats(-3, 3))
@settings(deadline=None, max_examples=100)
def test_no_matrix_is_rounded_worse_than_with_its_maximum_over_7(
    shape: tuple[int, int, int], seed: int, exponent: float
) -> None:
    rows, columns, group_size = shape
    weight = gaussian(rows, columns, seed, scale=10**exponent)
    padded = torch.nn.functional.pad(weight, (0, -columns % group_size)).view(-1, group_size)
    plain = squared_error(padded, padded.abs().amax(-1) / 7)
    found = float(
        ((dequantize(quantize_rtn(weight, group_size), torch.float64) - weight.double()) ** 2).sum()
    )
    power = float((weight.double() ** 2).sum())
    assert found <= plain * 1.005 + 1e-6 * power  # the fp16 rounding of either scale


def test_every_element_takes_the_nearest_code_of_its_scale() -> None:
    weight = gaussian(16, 256)
    matrix = quantize_rtn(weight, 64)
    scales = matrix.scales.double().repeat_interleave(64, dim=1)
    nearest = (weight.double() / scales).round().clamp(-8, 7) + 8
    # float32 and float64 may part on a tie only
    assert (nearest != unpack_codes(matrix.codes)).double().mean() < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_scale_search_beats_plain_maximum_scales_on_gaussian_matrices(seed: int) -> None:
    weight = gaussian(256, 1024, seed)
    groups = weight.view(-1, 128)
    largest = groups.abs().amax(-1)
    found = float(((dequantize(quantize_rtn(weight), torch.float64) - weight.double()) ** 2).sum())
    assert found < 0.72 * squared_error(groups, largest / 7)
    assert found < 0.80 * squared_error(groups, largest / 7.5)
    # close to the best scale of either sign on a fine grid
    candidates = [sign * largest / ratio for ratio in np.arange(6.5, 14, 0.1) for sign in (1, -1)]
    stored = torch.stack(candidates).half().double()[:, :, None]
    codes = (groups.double() / stored).round().clamp(-8, 7)
    best = float(((codes * stored - groups.double()) ** 2).sum(-1).amin(0).sum())
    assert found < 1.03 * best


def test_a_group_depends_on_its_own_weights_alone() -> None:
    weight = gaussian(64, 512)
    whole = quantize_rtn(weight)
    for row in (0, 17, 63):
        alone = quantize_rtn(weight[row : row + 1, 128:256])
        assert torch.equal(alone.codes[0], whole.codes[row, 64:128])
        assert torch.equal(alone.scales[0], whole.scales[row, 1:2])


def test_results_do_not_depend_on_how_the_matrix_is_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(24, 300)
    whole = quantize_rtn(weight, 64)
    monkeypatch.setattr("localmoe.kernels.int4._CHUNK_ELEMENTS", 64 * 7)
    chunked = quantize_rtn(weight, 64)
    assert torch.equal(chunked.codes, whole.codes) and torch.equal(chunked.scales, whole.scales)


def test_weights_that_are_codes_times_a_scale_come_back() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-7, 8, (32, 256), generator=generator).float()
    weight = codes * torch.rand(32, 1, generator=generator).half().float()
    back = dequantize(quantize_rtn(weight), torch.float32)
    torch.testing.assert_close(back, weight, rtol=1e-3, atol=0)


def test_the_largest_weight_sits_on_the_longer_side_of_the_codes() -> None:
    weight = torch.linspace(-0.5, 1.0, 128)[None]
    for sign in (1, -1):
        matrix = quantize_rtn(sign * weight)
        assert unpack_codes(matrix.codes)[0, -1] == 0
        assert matrix.scales.item() * sign < 0


def test_padding_columns_are_zeros_and_vanish_again() -> None:
    weight = gaussian(8, 2880 % 1024)
    matrix = quantize_rtn(weight)
    assert (matrix.in_features, matrix.padded_features) == (832, 896)
    assert (unpack_codes(matrix.codes)[:, 832:] == 8).all()
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
def test_a_group_size_that_does_not_fill_bytes_is_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match="even"):
        quantize_rtn(gaussian(2, 32), group_size)


def test_a_matrix_takes_about_an_eighth_of_float32() -> None:
    matrix = quantize_rtn(gaussian(128, 1024))
    assert matrix.num_bytes == 128 * 1024 // 2 + 128 * 8 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size", "fused"),
    [
        (64, 256, 128, True),
        (48, 96, 32, True),
        (32, 200, 64, True),  # K padded to 256
        (16, 2880, 128, True),  # K padded to 2944
        (40, 256, 128, False),  # N no multiple of 16
        (64, 96, 16, False),  # a group size that the fused kernel does not know
    ],
)
def test_linear_multiplies_by_the_dequantised_matrix(
    rows: int, columns: int, group_size: int, fused: bool, dtype: torch.dtype
) -> None:
    matrix = quantize_rtn(gaussian(rows, columns), group_size)
    linear = Int4Linear(matrix)
    assert linear.fused == fused
    for tokens in (0, 1, 5, 33):
        x = gaussian(tokens, columns, seed=tokens, scale=1).to(dtype)
        y = linear(x)
        assert y.dtype == dtype and y.shape == (tokens, rows)
        expected = x.double() @ torch.from_numpy(loop_values(matrix)).T
        # bfloat16 rounds every activation and scale by at most 2^-9, the result once more
        size = x.double().abs() @ torch.from_numpy(loop_values(matrix)).abs().T
        tolerance = 2**-7 if fused or dtype == torch.bfloat16 else 1e-5
        assert ((y.double() - expected).abs() <= tolerance * size).all()
        assert tokens == 0 or (y.double() - expected).norm() < 0.01 * expected.norm()


def test_linear_takes_rows_that_are_not_contiguous() -> None:
    linear = Int4Linear(quantize_rtn(gaussian(32, 128)))
    x = gaussian(128, 6, scale=1).t()
    assert torch.equal(linear(x), linear(x.contiguous()))


def test_linear_counts_the_bytes_it_holds() -> None:
    matrix = quantize_rtn(gaussian(64, 256))
    assert Int4Linear(matrix).num_bytes == 64 * 256 // 2 + 2 * 64 * 2 * 2  # codes, bf16 scale and zero
    odd = quantize_rtn(gaussian(40, 256))
    assert Int4Linear(odd).num_bytes == odd.num_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_codes_and_products_of_the_cpu() -> None:
    weight = gaussian(64, 300)
    matrix, on_gpu = quantize_rtn(weight), quantize_rtn(weight.cuda())
    assert (unpack_codes(matrix.codes) != unpack_codes(on_gpu.codes.cpu())).float().mean() < 1e-3
    x = gaussian(5, 300, scale=1)
    torch.testing.assert_close(
        Int4Linear(matrix, "cuda")(x.cuda()).cpu(),
        x @ dequantize(matrix, torch.float32).T,
        rtol=1e-3,
        atol=1e-3,
    )
