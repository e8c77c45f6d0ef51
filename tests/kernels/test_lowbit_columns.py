"""Packed rows whose input features lie in an order of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.kernels.codes import BITS, dequantize, quantize_rtn
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_rows import PackedRows


@given(st.sampled_from(BITS), st.integers(2, 150), st.sampled_from([32, 64]), st.integers(0, 10**6))
@settings(max_examples=20)
def test_weights_come_back_in_the_order_of_the_input_features(
    bits: int, columns: int, group_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = PackedRows.empty((3, 4, columns), bits, group_size, "cpu", indexed=True)
    matrices = []
    for expert in range(3):
        matrix = quantize_rtn(torch.randn(4, columns, generator=generator), bits, group_size)
        if expert != 1:  # one in order among others
            matrix = replace(matrix, columns=torch.randperm(columns, generator=generator))
        packed.set_expert(expert, matrix)
        matrices.append(matrix)
    for expert, matrix in enumerate(matrices):
        assert torch.equal(packed.dequantize(expert), dequantize(matrix, torch.float32))


def test_the_index_is_counted_and_only_of_gate_up() -> None:
    plain, indexed = (
        LowBitExperts.empty(5, 96, 64, 4, 32, "meta", indexed=indexed) for indexed in (False, True)
    )
    assert indexed.num_bytes - plain.num_bytes == 5 * 96 * 4
    assert plain.gate_up.columns is None and indexed.down.columns is None


def test_rows_without_an_index_refuse_an_order() -> None:
    matrix = quantize_rtn(torch.randn(64, 64), 4, 32)
    shuffled = replace(matrix, columns=torch.arange(64).flip(0))
    experts = LowBitExperts.empty(1, 64, 32, 4, 32, "cpu", indexed=True)
    down = quantize_rtn(torch.randn(64, 32), 4, 32)
    experts.set_expert(0, shuffled, down)
    with pytest.raises(ValueError, match="keep no order"):
        experts.set_expert(0, shuffled, replace(down, columns=torch.arange(32).flip(0)))
