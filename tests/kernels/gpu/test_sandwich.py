"""Norms and sums between the parts of a layer are those of the kernels that do one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dense_cases import DEVICE, DTYPES, in_nan, normal, poisoned_empty

from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.sandwich import enter_feed_forward, leave_feed_forward

EPS = 1e-6


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


def rows_of(rows: int, length: int, dtype: torch.dtype, seeds: range) -> list[Tensor]:
    return [normal(rows, length, dtype=dtype, seed=seed, scale=1.0 + seed) for seed in seeds]


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """A GPU's sums of squares are in another order, which may turn a rounding."""
    assert got.dtype == wanted.dtype and got.is_contiguous()
    if DEVICE.type == "cpu":
        assert torch.equal(got, wanted)
    else:
        assert (got != wanted).float().mean() < 0.01
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(1, 64), (3, 100), (5, 2816)])
def test_the_sum_behind_attention_and_its_three_norms(rows: int, length: int, dtype: torch.dtype) -> None:
    mixed, residual = rows_of(rows, length, dtype, range(2))
    behind, *before = (normal(length, dtype=dtype, seed=seed) for seed in range(2, 6))
    found = enter_feed_forward(mixed, residual, behind, (before[0], before[1], before[2]), EPS, 0.019)
    total = residual + rms_norm(mixed, behind, EPS)
    wanted = [total, *(rms_norm(total, weight, EPS) for weight in before[:2])]
    wanted.append(rms_norm(total, before[2], EPS, factor=0.019))
    for got, one in zip(found, wanted, strict=True):
        assert_same(got, one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(1, 64), (3, 100), (5, 2816)])
def test_the_sum_behind_both_kinds_of_experts(rows: int, length: int, dtype: torch.dtype) -> None:
    dense, routed, residual = rows_of(rows, length, dtype, range(3))
    weights = [normal(length, dtype=dtype, seed=seed) for seed in range(3, 6)]
    factor = normal(1, dtype=dtype, seed=6)
    got = leave_feed_forward(dense, routed, residual, (weights[0], weights[1], weights[2]), EPS, factor)
    both = rms_norm(dense, weights[0], EPS) + rms_norm(routed, weights[1], EPS)
    assert_same(got, (residual + rms_norm(both, weights[2], EPS)) * factor)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    dtype = DTYPES[0]
    tensors = rows_of(9, 2816, dtype, range(3))
    weights = tuple(normal(2816, dtype=dtype, seed=seed) for seed in range(3, 6))
    factor = normal(1, dtype=dtype, seed=6)
    whole = leave_feed_forward(*tensors, weights, EPS, factor)
    entered = enter_feed_forward(*tensors[:2], weights[0], weights, EPS, 0.5)
    for row in (0, 4, 8):
        alone = [tensor[row : row + 1] for tensor in tensors]
        assert torch.equal(leave_feed_forward(*alone, weights, EPS, factor)[0], whole[row])
        for one, all_rows in zip(
            enter_feed_forward(*alone[:2], weights[0], weights, EPS, 0.5), entered, strict=True
        ):
            assert torch.equal(one[0], all_rows[row])


def test_no_rows_and_rows_that_are_not_one_after_another() -> None:
    weights = tuple(normal(64, dtype=DTYPES[0], seed=seed) for seed in range(3))
    nothing = torch.zeros(0, 64, dtype=DTYPES[0], device=DEVICE)
    assert leave_feed_forward(nothing, nothing, nothing, weights, EPS, weights[0][:1]).shape == (0, 64)
    apart = in_nan(normal(3, 64, dtype=DTYPES[0]))
    with pytest.raises(AssertionError, match="rows one after another"):
        enter_feed_forward(apart, apart, weights[0], weights, EPS, 1.0)
