"""Rounding by compiled loops against `quantize_rtn`, and what neither takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba")

from localmoe.kernels.codes import BITS, SCALE_RATIOS, dequantize, quantize_rtn, round_to_codes
from localmoe.kernels.cpu.rounding import round_bfloat16


def gaussian(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).bfloat16()


def squared_error(weight: Tensor, found: Tensor) -> float:
    return float(((found.double() - weight.double()) ** 2).sum())


def least_error(group: Tensor, bits: int) -> float:
    """Of a float32 group with each ratio's codes and the scale that is best for them, in float64. Codes that
    are rounded anew, with the scale that was found, are no worse, and better by luck."""
    low, high = group.aminmax()
    largest = high if high > -low else low
    if largest == 0:
        return 0.0
    unit = group * (-1 / largest)
    errors = []
    for ratio in SCALE_RATIOS[bits]:
        codes = (unit * ratio).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1).double()
        gain = (codes @ unit.double()) ** 2 / (codes @ codes).clamp_min(1e-30)
        errors.append(float(unit.double().square().sum() - gain))
    return max(0.0, min(errors)) * float(largest) ** 2


shapes = st.tuples(st.integers(1, 9), st.integers(1, 70), st.sampled_from([2, 6, 16, 32]))


@given(shapes, st.sampled_from(BITS), st.integers(0, 10**6), st.floats(-4, 3))
@example((2, 60, 32), 8, 1, 0.099609375)  # two ratios that float32 cannot tell apart
@example((8, 30, 6), 8, 2005, 0.0)  # as good ones, of which one gets other codes from its rounded scale
@settings(max_examples=100)
def test_scales_are_as_good_and_codes_the_nearest(
    shape: tuple[int, int, int], bits: int, seed: int, exponent: float
) -> None:
    rows, columns, group_size = shape
    weight = gaussian(rows, columns, seed, 10**exponent)
    found, wanted = round_bfloat16(weight, bits, group_size), quantize_rtn(weight, bits, group_size)
    padded = torch.nn.functional.pad(weight, (0, -columns % group_size)).float()
    groups = padded.view(-1, group_size)
    nearest = round_to_codes(groups, found.scales.view(-1, 1), bits)
    assert torch.equal(found.codes, nearest.view(rows, -1))
    assert (found.in_features, found.group_size, found.bits) == (columns, group_size, bits)
    for part, group in enumerate(groups):  # each by itself: two scales may be as good
        row, at = divmod(part, padded.shape[1] // group_size)
        columns_of = slice(at * group_size, (at + 1) * group_size)
        errors = [
            squared_error(weight[row, columns_of], dequantize(matrix, torch.float64)[row, columns_of])
            for matrix in (found, wanted)
        ]
        # either scale's float16 rounding: relative, or half a step of the smallest numbers; and which ratio
        # looks best to float32 sums of a group's products, which enter squared
        relative = 2**-22 + 4 * (group_size + 1) * 2**-24
        slack = relative * float(group.double().square().sum())
        slack += group_size * (2**bits * 2**-25) ** 2
        assert max(errors) <= least_error(group, bits) * 1.001 + slack


def test_nearly_all_scales_are_those_of_the_reference() -> None:
    weight = gaussian(256, 1024)
    for bits in (2, 3, 4):
        found, wanted = round_bfloat16(weight, bits, 128), quantize_rtn(weight, bits, 128)
        assert (found.scales == wanted.scales).double().mean() > 0.98


def test_rows_apart_and_groups_of_zeros_are_rounded_too() -> None:
    weight = gaussian(12, 64)
    weight[3], weight[5, :32] = 0, 1e-38
    found = round_bfloat16(weight[1::2], 4, 32)  # gate and up alternate in some models
    assert torch.equal(found.codes, round_bfloat16(weight[1::2].contiguous(), 4, 32).codes)
    assert (found.scales[1] == 1).all() and (found.codes[1] == 8).all()
    assert not dequantize(found, torch.float32)[2, :32].any()


def test_threads_at_once_find_the_same() -> None:
    weights = [gaussian(128, 512, seed) for seed in range(8)]
    alone = [round_bfloat16(weight, 4, 128) for weight in weights]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(lambda weight: round_bfloat16(weight, 4, 128), weights))
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_cannot_be_rounded_is_refused_in_the_same_words(wrong: float) -> None:
    weight = gaussian(4, 64)
    weight[2, 40] = wrong
    with pytest.raises(ValueError, match="the matrix has a weight") as reference:
        quantize_rtn(weight, 4, 32)
    with pytest.raises(ValueError, match="the matrix has a weight") as found:
        round_bfloat16(weight, 4, 32)
    assert str(found.value) == str(reference.value)


def test_odd_groups_and_unknown_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="group"):
        round_bfloat16(gaussian(2, 30), 4, 15)
    with pytest.raises(ValueError, match="5 bits"):
        round_bfloat16(gaussian(2, 32), 5, 16)
