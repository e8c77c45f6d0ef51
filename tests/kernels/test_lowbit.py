"""Packing of low-bit experts against loops over the documented layout and against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.errors import DraftError
from localmoe.kernels import lowbit_rows
from localmoe.kernels.codes import BITS, CodeMatrix, dequantize, quantize_rtn
from localmoe.kernels.lowbit import LowBitExperts, pack_experts
from localmoe.kernels.lowbit_rows import PackedRows, codes_per_word


def code_matrix(rows: int, columns: int, bits: int, group_size: int, seed: int) -> CodeMatrix:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group_size)
    codes = torch.randint(0, 1 << bits, (rows, groups * group_size), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, groups, generator=generator).half()
    return CodeMatrix(codes, scales, columns, group_size, bits)


def code_at(packed: PackedRows, expert: int, row: int, column: int) -> int:
    """One code, found bit by bit as the module's text describes."""
    group, inside = divmod(column, packed.group_size)
    per_group = packed.group_size // codes_per_word(packed.bits)
    j, word = divmod(inside, per_group)
    at = group * per_group + word
    width = 2 if packed.bits == 3 else packed.bits
    code = int(packed.words[expert, row, at]) >> (width * j) & ((1 << width) - 1)
    if packed.bits == 3:
        code |= (int(packed.top_bits[expert, row, at]) >> j & 1) << 2
    return code


@given(
    st.sampled_from(BITS), st.sampled_from([32, 64, 96, 128, 256]), st.integers(1, 300), st.integers(1, 5),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25)
def test_codes_lie_where_the_layout_says(
    bits: int, group_size: int, columns: int, rows: int, seed: int
) -> None:
    matrices = [code_matrix(rows, columns, bits, group_size, seed + i) for i in range(2)]
    packed = PackedRows.empty((2, rows, columns), bits, group_size, "cpu")
    for expert in (1, 0):
        packed.set_expert(expert, matrices[expert])
    for expert, matrix in enumerate(matrices):
        assert torch.equal(packed.codes(expert), matrix.codes)
        assert torch.equal(packed.scales[expert], matrix.scales)
        generator = torch.Generator().manual_seed(seed)
        for column in torch.randint(0, matrix.codes.shape[1], (20,), generator=generator).tolist():
            row = column % rows
            assert code_at(packed, expert, row, column) == int(matrix.codes[row, column])


@pytest.mark.parametrize("bits", BITS)
def test_values_are_scale_times_code_less_half_the_range(bits: int) -> None:
    matrix = code_matrix(3, 70, bits, 32, seed=5)
    packed = PackedRows.empty((1, 3, 70), bits, 32, "cpu")
    packed.set_expert(0, matrix)
    values = packed.dequantize(0)
    assert values.shape == (3, 70) and values.dtype == torch.float32
    for row in range(3):
        for column in range(70):
            expected = float(matrix.scales[row, column // 32]) * (
                int(matrix.codes[row, column]) - 2 ** (bits - 1)
            )
            assert float(values[row, column]) == pytest.approx(expected, rel=1e-6, abs=0)


@given(
    st.sampled_from(BITS), st.integers(1, 6), st.integers(1, 200), st.sampled_from([32, 64, 128]),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=30)
def test_matrices_keep_their_values(bits: int, rows: int, inner: int, group_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = rows * 7
    pairs = [
        (
            quantize_rtn(torch.randn(2 * inner, hidden, generator=generator), bits, group_size),
            quantize_rtn(torch.randn(hidden, inner, generator=generator), bits, group_size),
        )
        for _ in range(3)
    ]
    experts = pack_experts([up for up, _ in pairs], [down for _, down in pairs], "cpu")
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (3, hidden, inner)
    for expert, (up, down) in enumerate(pairs):
        got_up, got_down = experts.dequantize(expert)
        assert torch.equal(got_up, dequantize(up, torch.float32))
        assert torch.equal(got_down, dequantize(down, torch.float32))
    matrices = [matrix for pair in pairs for matrix in pair]
    codes = sum(matrix.codes.numel() * bits // 8 for matrix in matrices)
    assert experts.num_bytes == codes + sum(matrix.scales.nbytes for matrix in matrices)


@pytest.mark.parametrize("bits", BITS)
def test_codes_take_their_bits_and_no_more(bits: int) -> None:
    packed = PackedRows.empty((2, 6, 200), bits, 64, "meta")
    assert packed.num_bytes == 2 * 6 * (256 * bits // 8 + 4 * 2)


def test_a_few_rows_at_a_time_pack_like_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = code_matrix(37, 100, 3, 32, seed=1)
    packed = [PackedRows.empty((1, 37, 100), 3, 32, "cpu") for _ in range(2)]
    packed[0].set_expert(0, matrix)
    monkeypatch.setattr(lowbit_rows, "_CHUNK_CODES", 128 * 5 + 1)
    packed[1].set_expert(0, matrix)
    assert torch.equal(packed[0].codes(0), matrix.codes) and torch.equal(packed[1].codes(0), matrix.codes)


def test_packing_one_expert_leaves_the_others_alone() -> None:
    experts = LowBitExperts.empty(3, 64, 32, 4, 32, "cpu").random_(torch.Generator().manual_seed(0))
    before = [experts.dequantize(expert) for expert in range(3)]
    up, down = quantize_rtn(torch.randn(64, 64), 4, 32), quantize_rtn(torch.randn(64, 32), 4, 32)
    experts.set_expert(1, up, down)
    for expert in (0, 2):
        assert all(map(torch.equal, experts.dequantize(expert), before[expert]))
    assert torch.equal(experts.dequantize(1)[1], dequantize(down, torch.float32))


@pytest.mark.parametrize("bits", BITS)
def test_random_experts_use_all_codes_and_repeat_with_the_seed(bits: int) -> None:
    bias = torch.empty(2, 128)
    make = [
        LowBitExperts.empty(
            2, 256, 64, bits, 64, "cpu", gate_up_bias=bias.clone(), down_bias=torch.zeros(2, 256)
        )
        for _ in range(2)
    ]
    first, second = (experts.random_(torch.Generator().manual_seed(7)) for experts in make)
    assert torch.equal(first.gate_up.codes(1), second.gate_up.codes(1))
    assert torch.equal(first.gate_up_bias, second.gate_up_bias)
    assert first.gate_up.codes(0).unique().numel() == 1 << bits
    for packed in (first.gate_up, first.down):
        gain = packed.dequantize(0).square().sum(1).mean().sqrt()  # of a product with unit noise
        assert 0.5 < float(gain) < 2


@pytest.mark.parametrize(("bits", "group_size"), [(5, 128), (4, 16), (4, 48), (4, 512), (1, 64)])
def test_what_has_no_kernel_is_refused_with_the_remedy(bits: int, group_size: int) -> None:
    with pytest.raises(DraftError, match=rf"{bits} bits in groups of {group_size} .* 32, 64, 128 or 256"):
        LowBitExperts.empty(1, 64, 64, bits, group_size, "meta")


def test_a_matrix_of_another_shape_or_format_is_a_programming_error() -> None:
    packed = PackedRows.empty((1, 4, 64), 4, 32, "cpu")
    with pytest.raises(AssertionError):
        packed.set_expert(0, code_matrix(4, 64, 3, 32, 0))
    with pytest.raises(AssertionError):
        packed.set_expert(0, quantize_rtn(torch.randn(5, 64), 4, 32))
    with pytest.raises(AssertionError):
        packed.set_expert(0, quantize_rtn(torch.randn(4, 64), 4, 64))


def test_columns_out_of_order_are_refused() -> None:
    packed = PackedRows.empty((1, 4, 64), 4, 32, "cpu")
    matrix = code_matrix(4, 64, 4, 32, 0)
    shuffled = CodeMatrix(matrix.codes, matrix.scales, 64, 32, 4, torch.arange(64).flip(0))
    with pytest.raises(ValueError, match="order of activations"):
        packed.set_expert(0, shuffled)
