"""Row padding: a measured multiple that does what it promises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from localmoe.kernels import rows as rows_module
from localmoe.kernels.rows import CANDIDATES, measure_row_multiple


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 33), (256, 128), (1000, 96), (352, 1024)])
def test_with_the_measured_multiple_a_row_is_the_same_alone_and_anywhere_among_others(
    shape: tuple[int, int], dtype: torch.dtype, transposed: bool
) -> None:
    weight = normal(*(reversed(shape) if transposed else shape)).to(dtype)
    multiple = measure_row_multiple([weight], 17, transposed=transposed)
    if multiple is None:
        pytest.skip("no padding makes rows independent on this machine")

    def product(part: Tensor) -> Tensor:
        full = F.pad(part, (0, 0, 0, -len(part) % multiple))
        return (full @ weight if transposed else F.linear(full, weight))[: part.shape[0]]

    for seed in range(12):  # in 16 bits other sums show in few outputs
        x = normal(17, shape[1], seed=seed).to(dtype)
        whole = product(x)
        for count in (*range(1, 18 if seed == 5 else 4), 16, 17):
            for first in {0, 1, 17 - count, (17 - count) // 2} - {18 - count}:
                assert torch.equal(product(x[first : first + count]), whole[first : first + count])


def order_depends_below(rows_needed: int) -> object:
    """Stands in for a library that sums in another order when fewer than `rows_needed` rows come."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        out = (x * 8).round() @ (weight * 8).round().T  # whole numbers, so the real order does not show
        return out if x.shape[0] >= rows_needed else out + 1

    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", [33, 96, 1024])
def test_another_order_of_summation_shows_however_much_is_rounded_away(
    monkeypatch: pytest.MonkeyPatch, inner: int, dtype: torch.dtype
) -> None:
    """Of one row alone: few of a thousand outputs in bfloat16 differ then."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        step = -1 if x.shape[0] == 1 else 1
        terms = x.float()[:, None] * weight.float()
        places = list(range(inner))[::step]
        return sum((terms[..., place] for place in places), torch.zeros(1)).to(dtype)

    monkeypatch.setattr(rows_module.F, "linear", linear)
    assert measure_row_multiple([normal(12, inner).to(dtype)], 17, transposed=False) == 2


@pytest.mark.parametrize("needed", [1, 2, 5, 8, 9, CANDIDATES[-1]])
def test_the_smallest_sufficient_multiple_is_found(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    monkeypatch.setattr(rows_module.F, "linear", order_depends_below(needed))
    expected = min(multiple for multiple in CANDIDATES if multiple >= needed)
    assert measure_row_multiple([normal(8, 8)], 4 * CANDIDATES[-1], transposed=False) == expected


def test_the_weight_that_needs_most_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return order_depends_below(8 if weight.shape[0] == 12 else 2)(x, weight)  # type: ignore[operator]

    monkeypatch.setattr(rows_module.F, "linear", linear)
    weights = [normal(4, 8), normal(12, 8), normal(4, 8)]
    assert measure_row_multiple(weights, 32, transposed=False) == 8
    assert measure_row_multiple(weights[:1], 32, transposed=False) == 2


def test_none_is_said_where_no_multiple_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T + x.shape[0] * 1e-3

    monkeypatch.setattr(rows_module.F, "linear", linear)
    assert measure_row_multiple([normal(8, 8)], 1000, transposed=False) is None


def test_a_product_that_depends_on_the_rows_place_is_not_called_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        out = x @ weight.T
        out[8:] += 1e-3  # as a kernel that cuts the rows into blocks of eight and treats the rest differently
        return out

    monkeypatch.setattr(rows_module.F, "linear", linear)
    assert measure_row_multiple([normal(8, 8)], 17, transposed=False) not in (1, 2, 4)


def test_a_product_that_treats_every_second_row_otherwise_is_not_called_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        out = x @ weight.T
        out[1::2] += 1e-3
        return out

    monkeypatch.setattr(rows_module.F, "linear", linear)
    assert measure_row_multiple([normal(8, 8)], 17, transposed=False) is None
