"""The exact and the one-row products against float64, at shapes that fill no tile, in seas of NaN."""

from __future__ import annotations

import pytest
import torch
from dense_cases import DTYPES, assert_rounded, in_nan, normal, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.activations import Activation
from localmoe.kernels.dense import reference_linear, reference_linear_gated
from localmoe.kernels.gpu.configs import num_multiprocessors, row_config, tile_config
from localmoe.kernels.gpu.linear import gemv, gemv_gated, linear, linear_gated

SHAPES = [(1, 1, 64), (2, 60, 100), (9, 33, 256), (16, 48, 16), (17, 130, 192), (40, 65, 1408), (130, 70, 72)]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


def slack(x: Tensor, weight: Tensor) -> Tensor:
    """Bound on the error of float32 sums of these products."""
    return (x.double().abs() @ weight.double().abs().T) * x.shape[1] ** 0.5 * 2.0**-23 + 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_a_product_is_rounded_once(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x = in_nan(normal(rows, depth, dtype=dtype))
    weight = in_nan(normal(columns, depth, dtype=dtype, seed=1))
    bias = normal(columns, dtype=dtype, seed=2)
    exact = reference_linear(x.double(), weight.double(), bias.double())
    assert_rounded(linear(x, weight, bias), exact, slack(x, weight))
    assert_rounded(linear(x, weight), exact - bias.double(), slack(x, weight))
    wide = linear(x, weight, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_rounded(wide, exact - bias.double(), slack(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposed_activation_needs_no_copy(dtype: torch.dtype) -> None:
    x = in_nan(normal(96, 5, dtype=dtype)).T
    weight = normal(20, 96, dtype=dtype, seed=1)
    assert_rounded(linear(x, weight), x.double() @ weight.double().T, slack(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_after_the_rounding(dtype: torch.dtype) -> None:
    x, weight = normal(3, 64, dtype=dtype), normal(40, 64, dtype=dtype, seed=1)
    residual = in_nan(normal(3, 40, dtype=dtype, seed=2, scale=100.0))
    assert torch.equal(linear(x, weight, residual=residual), linear(x, weight) + residual)
    one = residual[1:2]
    assert torch.equal(gemv(x[1:2], weight, residual=one), gemv(x[1:2], weight) + one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_a_gated_product_is_rounded_once(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x = in_nan(normal(rows, depth, dtype=dtype, scale=depth**-0.5))
    weight = in_nan(normal(2 * columns, depth, dtype=dtype, seed=1))
    exact = reference_linear_gated(x.double(), weight.double())
    assert_rounded(linear_gated(x, weight), exact, 1e-5)
    activation = Activation("gelu_tanh")
    exact = reference_linear_gated(x.double(), weight.double(), activation)
    assert_rounded(linear_gated(x, weight, activation=activation), exact, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(1, 64), (60, 2048), (13, 1408), (7, 2880), (33, 30)])
def test_one_row_products(columns: int, depth: int, dtype: torch.dtype) -> None:
    x = in_nan(normal(1, depth, dtype=dtype, scale=depth**-0.5))
    weight = in_nan(normal(2 * columns, depth, dtype=dtype, seed=1))
    bias = normal(2 * columns, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T
    assert_rounded(gemv(x, weight), exact, slack(x, weight))
    assert_rounded(gemv(x, weight, bias, out_dtype=torch.float32), exact + bias.double(), slack(x, weight))
    assert_rounded(gemv_gated(x, weight), reference_linear_gated(x.double(), weight.double()), 1e-5)


@settings(max_examples=15)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 300), st.integers(0, 99))
def test_products_of_any_shape(rows: int, columns: int, depth: int, seed: int) -> None:
    x = in_nan(normal(rows, depth, dtype=DTYPES[0], seed=seed))
    weight = in_nan(normal(columns, depth, dtype=DTYPES[0], seed=seed + 1))
    assert_rounded(linear(x, weight), x.double() @ weight.double().T, slack(x, weight))


def test_one_row_is_asked_of_one_row_products() -> None:
    with pytest.raises(AssertionError, match="2 rows"):
        gemv(normal(2, 16, dtype=DTYPES[0]), normal(4, 16, dtype=DTYPES[0]))


@given(
    st.sampled_from([1, 60, 2048, 5632, 6144, 11_264, 32_000, 151_936]) | st.integers(1, 200_000),
    st.sampled_from([64, 128, 768, 1408, 2048, 2880, 5632]) | st.integers(1, 20_000),
    st.sampled_from([1, 16, 17, 64, 128, 129, 1024]),
    st.sampled_from([10, 28, 46, 82, 128, 132, 170]),
    st.sampled_from([1, 2]),
)
def test_blocks_fit_every_gpu(columns: int, depth: int, rows: int, num_sms: int, matrices: int) -> None:
    config = tile_config(columns, depth, rows, num_sms, matrices)
    stage = 2 * config.block_k * (config.block_m + matrices * config.block_n)
    assert stage * config.stages <= 99 * 1024
    blocks = (config.block_m, config.block_n, config.block_k, *row_blocks(columns, depth, num_sms, matrices))
    assert all(block & (block - 1) == 0 for block in blocks)
    assert min(config.block_m, config.block_n, config.block_k) >= 16
    # below the tall tiles of long prompts the depth of a block is the weight's own
    assert rows > 128 or config.block_k == tile_config(columns, depth, 1, num_sms, matrices).block_k


def row_blocks(columns: int, depth: int, num_sms: int, matrices: int) -> tuple[int, int]:
    config = row_config(columns, depth, num_sms, matrices)
    return config.block_n, config.block_k


def test_a_tall_tile_never_meets_four_warps() -> None:
    """64 rows and a multiple of 4 warps would be wgmma on sm_90, which sums in another order."""
    configs = [
        tile_config(n, 2048, rows, 132) for n in (1, 60, 2048, 151_936) for rows in (1, 17, 64, 129, 1024)
    ]
    assert all(c.block_m < 64 or c.warps % 4 for c in configs)


def test_a_cpu_stands_for_a_small_gpu() -> None:
    assert num_multiprocessors(torch.device("cpu")) > 0
