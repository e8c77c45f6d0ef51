"""Rows of a table in the host's memory, bit by bit, and none but its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE

from localmoe.kernels.gpu.embedding import read_rows

ON_GPU = DEVICE.type == "cuda"


def in_the_middle(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A table in host memory, with a row of NaN before and behind it."""
    generator = torch.Generator().manual_seed(rows)
    around = torch.full((rows + 2, columns), torch.nan, dtype=dtype, pin_memory=ON_GPU)
    around[1:-1] = torch.randn(rows, columns, generator=generator)
    return around[1:-1]


def rows_of(table: Tensor, ids: list[int]) -> Tensor:
    found = read_rows(
        torch.tensor(ids, dtype=torch.int64, device=DEVICE), table.data_ptr(), *table.shape, table.dtype
    )
    assert found.device.type == DEVICE.type
    return found.cpu()


@given(st.data())
@settings(max_examples=25)
def test_rows_are_the_tables_bit_by_bit(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), 8 * data.draw(st.integers(1, 150))
    table = in_the_middle(rows, columns, data.draw(st.sampled_from([torch.float16, torch.bfloat16])))
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=12))
    assert torch.equal(rows_of(table, ids), table[torch.tensor(ids, dtype=torch.int64)])


def test_what_names_no_row_reads_the_first_or_the_last_one() -> None:
    table = in_the_middle(5, 64, torch.bfloat16)
    assert torch.equal(rows_of(table, [-1, 5, 1 << 40, -(1 << 40)]), table[[0, 4, 4, 0]])
