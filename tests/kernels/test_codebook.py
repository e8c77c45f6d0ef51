"""Codes of a table: NF4's values, exact integers, packing, and products on a CPU, against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from localmoe.kernels.codebook import NF4_VALUES, as_bytes, cut_groups, nf4_codebook, with_codebook
from localmoe.kernels.codes import CodeMatrix, dequantize, quantize_rtn
from localmoe.kernels.lowbit_linear import LowBitLinear
from localmoe.kernels.lowbit_rows import PackedRows


def table_matrix(
    rows: int, columns: int, group_size: int, seed: int, *, shuffled: bool = False
) -> CodeMatrix:
    """Random codes of a random table, with scales that float16 could not hold."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group_size)
    codes = torch.randint(16, (rows, groups * group_size), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, groups, generator=generator) * 1e-6
    order = torch.randperm(columns, generator=generator) if shuffled else None
    table = torch.randn(16, generator=generator)
    return CodeMatrix(codes, scales, columns, group_size, 4, order, table)


def loop_values(matrix: CodeMatrix) -> np.ndarray:
    """W in float64, element by element."""
    assert matrix.codebook is not None
    values = np.full((matrix.out_features, matrix.in_features), np.nan)
    for row in range(matrix.out_features):
        for column in range(matrix.in_features):
            feature = column if matrix.columns is None else int(matrix.columns[column])
            value = float(matrix.codebook[int(matrix.codes[row, column])])
            values[row, feature] = value * float(matrix.scales[row, column // matrix.group_size])
    return values


def test_the_values_are_quantiles_of_the_normal_distribution() -> None:
    # QLoRA, section 3: 8 quantiles above 0 and 7 below, evenly spaced to where 0.9677 of the mass lies
    edge = 0.9677083
    above = norm.ppf(np.linspace(edge, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(edge, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([above, [0.0], below]))
    np.testing.assert_allclose(NF4_VALUES, values / values.max(), rtol=0, atol=2e-7)
    assert torch.equal(nf4_codebook().double(), torch.tensor(NF4_VALUES, dtype=torch.float64))


@given(
    st.integers(1, 5), st.integers(1, 150), st.sampled_from([32, 64, 96]), st.booleans(), st.integers(0, 999)
)  # fmt: skip
@settings(max_examples=25)
def test_a_weight_is_its_scale_times_the_tables_value_packed_or_not(
    rows: int, columns: int, group_size: int, shuffled: bool, seed: int
) -> None:
    matrix = table_matrix(rows, columns, group_size, seed, shuffled=shuffled)
    wanted = torch.from_numpy(loop_values(matrix)).float()
    assert torch.equal(dequantize(matrix, torch.float32), wanted)
    assert torch.equal(dequantize(matrix, torch.bfloat16), wanted.bfloat16())
    packed = PackedRows.empty((2, rows, columns), 4, group_size, "cpu", indexed=True, codebook=True)
    for expert, made in enumerate((matrix, table_matrix(rows, columns, group_size, seed + 1))):
        packed.set_expert(expert, made)
    assert torch.equal(packed.codes(0), matrix.codes) and torch.equal(packed.dequantize(0), wanted)
    groups = packed.scales.shape[2]
    assert packed.num_bytes == 2 * (rows * groups * (group_size // 2 + 4) + 4 * columns + 64)


@given(st.integers(1, 4), st.integers(1, 400), st.sampled_from([32, 64, 128]), st.integers(0, 10**6))
@settings(max_examples=25)
def test_integers_as_a_table_in_finer_groups_are_the_same_weights(
    rows: int, columns: int, group_size: int, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    matrix = quantize_rtn(weight, 4, 128)
    wanted = dequantize(matrix, torch.float32)
    table = with_codebook(matrix, group_size)
    assert table.group_size == group_size and table.padded_features - columns < group_size
    assert torch.equal(dequantize(table, torch.float32), wanted)
    assert torch.equal(dequantize(cut_groups(matrix, group_size), torch.float32), wanted)
    packed = PackedRows.empty((1, rows, columns), 4, group_size, "cpu", codebook=True)
    packed.set_expert(0, matrix)
    assert torch.equal(packed.dequantize(0), wanted)
    assert with_codebook(table, 64) is table


def test_a_table_takes_no_integers_of_other_bits_and_integers_take_no_table() -> None:
    packed = PackedRows.empty((1, 4, 64), 4, 64, "cpu", codebook=True)
    for wrong in (quantize_rtn(torch.randn(4, 64), 8, 64), quantize_rtn(torch.randn(4, 64), 4, 32)):
        with pytest.raises(AssertionError):
            packed.set_expert(0, wrong)
    with pytest.raises(AssertionError):
        PackedRows.empty((1, 4, 64), 4, 64, "cpu").set_expert(0, table_matrix(4, 64, 64, 0))


@pytest.mark.parametrize("table", [nf4_codebook(), torch.zeros(16), torch.randn(16) * 1e-8])
def test_bytes_are_within_half_a_step_of_the_table(table: torch.Tensor) -> None:
    codes, scale = as_bytes(table)
    error = (codes.double() - 128) * scale - table.double()
    assert codes.dtype == torch.uint8 and error.abs().max() <= table.abs().max() / 254 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("rows", "columns", "fused"), [(64, 256, True), (32, 2880, True), (40, 192, False)]
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_on_a_cpu_is_that_of_the_values(
    rows: int, columns: int, fused: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // 64, generator=generator) * 1e-9  # float16 knows nothing as small
    order = torch.randperm(columns, generator=generator)
    matrix = CodeMatrix(codes, scales, columns, 64, 4, order, nf4_codebook())
    linear = LowBitLinear(matrix)
    assert linear.fused == fused
    weight = torch.from_numpy(loop_values(matrix))
    for tokens in (0, 1, 7):
        x = torch.randn(tokens, columns, generator=generator).to(dtype)
        y, expected = linear(x), x.double() @ weight.T
        assert y.dtype == dtype and y.shape == (tokens, rows)
        # of each group's largest weight: 1/254 for the table's values and 2^-8 for its scale; bfloat16's own
        size = x.double().abs() @ (matrix.scales.double().repeat_interleave(64, 1)[:, order.argsort()].T)
        tolerance = 1 / 254 + 2**-6 if fused or dtype == torch.bfloat16 else 1e-5
        assert ((y.double() - expected).abs() <= tolerance * size).all()
        assert tokens == 0 or (y.double() - expected).norm() < 0.01 * expected.norm()
    held = rows * (columns // 64) * (72 if fused else 68) + 8 * columns + (0 if fused else 64)
    assert linear.num_bytes == held
