"""Compiled operations on a few rows against PyTorch and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from localmoe.kernels.cpu.exponential import exponentials
from localmoe.kernels.cpu.row_ops import combine_rows, rms_norm
from localmoe.kernels.experts import combine


@given(st.integers(1, 20), st.integers(1, 300), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
@settings(max_examples=40)
def test_a_norm_is_that_of_float64_and_of_each_row_alone(
    rows: int, width: int, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(1, rows, width, generator=generator), torch.randn(width, generator=generator)
    got = rms_norm(x, weight=weight, eps=1e-5, offset=offset)
    wide = x.double()
    scale = (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(got.double(), wide * scale * (weight.double() + offset), atol=2e-6, rtol=2e-6)
    alone = [rms_norm(row, weight=weight, eps=1e-5, offset=offset) for row in x[0]]
    assert torch.equal(got[0], torch.stack(alone))
    strided = torch.empty(width, rows).T.copy_(x[0])
    assert torch.equal(rms_norm(strided, weight=weight, eps=1e-5, offset=offset), got[0])


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 70), st.integers(0, 99))
@settings(max_examples=40)
def test_a_weighted_sum_has_the_bits_of_the_plain_loop(rows: int, top_k: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, top_k, width, generator=generator)
    index = torch.stack([torch.randperm(60, generator=generator)[:top_k] for _ in range(rows)])
    weights = torch.rand(top_k, rows, generator=generator).T
    assert torch.equal(combine_rows(out, index, weights), combine(out, index, weights, torch.float32))


@njit
def _run(row: Any, top: Any) -> Any:
    return exponentials(row.ctypes.data, row.shape[0], top)


@pytest.mark.parametrize("top", [0.0, 3.25, -1e4])
def test_exponentials_are_within_two_units_in_the_last_place(top: float) -> None:
    below = np.concatenate([np.linspace(-86.9, 0, 4000), -np.logspace(-9, 1.9, 96)])
    row = (top + below).astype(np.float32)
    wanted = np.exp((row - np.float32(top)).astype(np.float64))
    total = _run(row, np.float32(top))
    assert (np.abs(row - wanted) <= 2 * np.spacing(wanted.astype(np.float32))).all()
    assert total == pytest.approx(row.astype(np.float64).sum(), rel=1e-5)


def test_what_is_far_below_counts_nothing_and_no_number_stays_none() -> None:
    row = np.zeros(32, dtype=np.float32)
    row[:4] = -88, -1e30, -np.inf, np.nan
    _run(row, np.float32(0))
    assert (row[:3] == 0).all() and np.isnan(row[3]) and (row[4:] == 1).all()
