"""Products with low-bit matrices against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.codes import BITS, CodeMatrix, dequantize, quantize_rtn
from localmoe.kernels.lowbit_linear import LowBitLinear


def gaussian(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def random_codes(rows: int, columns: int, bits: int, group_size: int, *, shuffled: bool) -> CodeMatrix:
    """Every code alike likely, so that each takes part, and scales of both signs."""
    generator = torch.Generator().manual_seed(rows * columns)
    groups = -(-columns // group_size)
    codes = torch.randint(2**bits, (rows, groups * group_size), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, groups, generator=generator).half()
    order = torch.randperm(columns, generator=generator) if shuffled else None
    return CodeMatrix(codes, scales, columns, group_size, bits, order)


def assert_product(linear: LowBitLinear, matrix: CodeMatrix, tokens: int, dtype: torch.dtype) -> None:
    x = gaussian(tokens, matrix.in_features, seed=tokens, scale=1).to(dtype)
    y = linear(x)
    assert y.dtype == dtype and y.shape == (tokens, matrix.out_features)
    weight = dequantize(matrix, torch.float64)
    expected = x.double() @ weight.T
    # bfloat16 rounds every activation and scale by at most 2^-8, the result once more
    size = x.double().abs() @ weight.abs().T
    tolerance = 2**-6 if linear.fused or dtype == torch.bfloat16 else 1e-5
    assert ((y.double() - expected).abs() <= tolerance * size).all()
    assert tokens == 0 or (y.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
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
    rows: int, columns: int, group_size: int, fused: bool, bits: int, dtype: torch.dtype
) -> None:
    matrix = quantize_rtn(gaussian(rows, columns), bits, group_size)
    linear = LowBitLinear(matrix)
    assert linear.fused == fused
    for tokens in (0, 1, 5, 33):
        assert_product(linear, matrix, tokens, dtype)


@given(
    st.sampled_from(BITS), st.sampled_from([16, 40, 64]), st.integers(1, 300), st.sampled_from([32, 128]),
    st.booleans(), st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=50)
def test_every_code_has_its_value_in_the_product(
    bits: int, rows: int, columns: int, group_size: int, shuffled: bool, tokens: int
) -> None:
    matrix = random_codes(rows, columns, bits, group_size, shuffled=shuffled)
    assert_product(LowBitLinear(matrix), matrix, tokens, torch.float32)


@pytest.mark.parametrize("bits", BITS)
def test_single_columns_come_out_exactly(bits: int) -> None:
    matrix = random_codes(32, 128, bits, 64, shuffled=True)
    scales = torch.full_like(matrix.scales, 0.25)  # exact in bfloat16, like every product with it
    matrix = CodeMatrix(matrix.codes, scales, 128, 64, bits, matrix.columns)
    linear = LowBitLinear(matrix)
    assert linear.fused
    assert torch.equal(linear(torch.eye(128)), dequantize(matrix, torch.float32).T)


def test_linear_takes_rows_that_are_not_contiguous() -> None:
    linear = LowBitLinear(quantize_rtn(gaussian(32, 128)))
    x = gaussian(128, 6, scale=1).t()
    assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.parametrize(("bits", "row_bytes"), [(2, 128), (3, 128), (4, 128), (8, 256)])
def test_linear_counts_the_bytes_it_holds(bits: int, row_bytes: int) -> None:
    matrix = quantize_rtn(gaussian(64, 256), bits)
    groups = 4 if bits == 8 else 2
    assert LowBitLinear(matrix).num_bytes == 64 * (row_bytes + groups * 4)  # codes, bf16 scale and zero
    odd = random_codes(40, 256, bits, 128, shuffled=True)
    assert LowBitLinear(odd).num_bytes == odd.num_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", BITS)
def test_cuda_gives_the_codes_and_products_of_the_cpu(bits: int) -> None:
    weight = gaussian(64, 300)
    matrix, on_gpu = quantize_rtn(weight, bits), quantize_rtn(weight.cuda(), bits)
    # of two scales that are as good either may be taken, with other codes
    errors = [float((dequantize(m.to("cpu"), torch.float64) - weight).norm()) for m in (matrix, on_gpu)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-2)
    assert (matrix.codes != on_gpu.codes.cpu()).float().mean() < (1e-3 if bits < 8 else 0.05)
    x = gaussian(5, 300, scale=1)
    torch.testing.assert_close(
        LowBitLinear(matrix, "cuda")(x.cuda()).cpu(),
        x @ dequantize(matrix, torch.float32).T,
        rtol=1e-3,
        atol=1e-3,
    )
