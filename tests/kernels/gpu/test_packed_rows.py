"""Rows of a weight in BF12 are what was packed, bit by bit, strays and odd numbers too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dense_cases import DEVICE, normal, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.kernels.bf12_tiles import NOWHERE
from localmoe.kernels.gpu.packed_rows import packed_rows
from localmoe.kernels.packed_weight import PackedWeight

BF16 = torch.bfloat16
SHAPES = [(40, 64), (7, 128), (96, 320), (36, 2048), (17, 2880)]
ODD = (0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 3.0e38, float("inf"), -float("inf"), float("nan"), 2.0**-60)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


def packed(weights: Tensor) -> PackedWeight:
    made = PackedWeight.empty(*weights.shape, DEVICE)
    made.put(0, weights)
    return made


def bits(values: Tensor) -> Tensor:
    return values.cpu().view(torch.int16)


def check(weights: Tensor, ids: list[int]) -> None:
    found = packed_rows(torch.tensor(ids, device=DEVICE), packed(weights))
    assert found.dtype == BF16 and torch.equal(bits(found), bits(weights[ids]))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rows_are_what_was_packed(rows: int, columns: int) -> None:
    weights = normal(rows, columns, dtype=torch.float32, scale=columns**-0.5).cpu().to(BF16)
    check(weights, [*range(rows), rows - 1, 0] if columns < 1024 else [0, rows - 1, 5])


@given(st.integers(0, 31), st.data())
@settings(max_examples=25)
def test_odd_numbers_anywhere_are_kept(strays: int, data: st.DataObject) -> None:
    weights = normal(35, 192, dtype=torch.float32, seed=strays, scale=0.1).cpu().to(BF16)
    for _ in range(min(strays, 31)):
        row, column = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 191))
        weights[row, column] = data.draw(st.sampled_from(ODD))
    check(weights, [0, 3, 34, *data.draw(st.lists(st.integers(0, 34), max_size=4)), *range(16)])


def test_a_full_strip_of_strays_is_looked_through() -> None:
    weights = normal(16, 64, dtype=torch.float32, scale=0.1).cpu().to(BF16)
    weights[0, :16] = weights[15, 40:56] = 2.0**-40
    assert int((packed(weights)._matrix.places != NOWHERE).sum()) == 32
    check(weights, [0, 15, 7])


def test_an_id_that_names_no_row_reads_the_first_or_the_last_one() -> None:
    weights = normal(40, 64, dtype=torch.float32).cpu().to(BF16)
    found = packed_rows(torch.tensor([-1, -(1 << 40), 40, 1 << 40], device=DEVICE), packed(weights))
    assert torch.equal(bits(found), bits(weights[[0, 0, 39, 39]]))


def test_no_ids_are_no_rows() -> None:
    weights = normal(16, 64, dtype=torch.float32).cpu().to(BF16)
    assert packed_rows(torch.empty(0, dtype=torch.int64, device=DEVICE), packed(weights)).shape == (0, 64)
