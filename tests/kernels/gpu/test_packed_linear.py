"""Products with a weight in BF12: right against float64 for every shape, bias and number of strays, and a
row's bits do not depend on what rides along. (Triton's interpreter rounds to bfloat16 by cutting off, so
outputs are float32 where it runs.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dense_cases import DEVICE, assert_rounded, in_nan, normal, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.kernels.bf12_tiles import NOWHERE, stray_room
from localmoe.kernels.gpu.linear import linear
from localmoe.kernels.gpu.packed_linear import OneRow, Tile, packed_linear, packed_row
from localmoe.kernels.packed_weight import PackedWeight

BF16, F32 = torch.bfloat16, torch.float32
# (N, K): no whole strips, one turn, an odd number of strips; as wide as heads are
SHAPES = [(40, 64), (7, 128), (96, 320), (36, 2048), (17, 2880), (20, 4096)]
REAL = [(151_936, 2048), (50_304, 2048), (201_088, 2880), (32_064, 4096)]
ROWS = (1, 2, 9, 16, 17, 32, 33, 48, 72)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


def weights_of(rows: int, columns: int, strays: int = 0, seed: int = 1) -> Tensor:
    """bfloat16, in RAM; each strip has at least `strays` in its first row and the last ones of its last."""
    made = normal(rows, columns, dtype=F32, seed=seed, scale=columns**-0.5).cpu()
    for first in range(0, rows, 16):
        for row, share in ((first, strays - strays // 2), (min(first + 16, rows) - 1, strays // 2)):
            made[row, columns - share :] = made[row, columns - share :].sign() * 2.0**-40
    return made.to(BF16)


def packed(weights: Tensor) -> PackedWeight:
    made = PackedWeight.empty(*weights.shape, DEVICE)
    for first in range(0, len(weights), 32):  # as readers do
        made.put(first, weights[first : first + 32])
    assert torch.equal(made.take().cpu(), weights)
    return made


def slack(x: Tensor, weights: Tensor) -> Tensor:
    """Bound on the error of float32 sums of these products."""
    return (x.double().abs() @ weights.double().abs().T) * x.shape[1] ** 0.5 * 2.0**-23 + 1e-9


def check(x: Tensor, weights: Tensor, bias: Tensor | None = None, **blocks: Tile | None) -> None:
    weight, whole = packed(weights), weights.to(DEVICE)
    exact = x.double() @ whole.double().T + (0.0 if bias is None else bias.double())
    assert_rounded(packed_linear(x, weight, bias, out_dtype=F32, **blocks), exact, slack(x, whole))
    if DEVICE.type == "cuda":
        assert_rounded(packed_linear(x, weight, bias, **blocks), exact, slack(x, whole))
    one = packed_row(x[:1], weight, bias, out_dtype=F32)
    assert_rounded(one, exact[:1], slack(x[:1], whole))


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_16_bit_weights(columns: int, depth: int, biased: bool) -> None:
    bias = normal(columns, dtype=BF16, seed=2) if biased else None
    rows = 18 if depth < 1024 else 2
    check(in_nan(normal(rows, depth, dtype=BF16)), weights_of(columns, depth), bias)


@pytest.mark.parametrize("strays", [1, 16, 17, 32])
@pytest.mark.parametrize("rows", [1, 20])
def test_strays_are_added_however_many_there_are(strays: int, rows: int) -> None:
    weights = weights_of(40, 64, strays)
    found = (packed(weights)._matrix.places != NOWHERE).sum(1)
    assert int(found.min()) >= strays and stray_room(64) == 32
    check(normal(rows, 64, dtype=BF16), weights, normal(40, dtype=BF16, seed=2))


def test_strays_alone() -> None:
    """What they add is seen where nothing else is."""
    weights = torch.zeros(48, 64, dtype=BF16)
    weights[::5, 3], weights[::7, 60] = 2.0**-30, 8.0
    weights[9, 3] = 2.0**-60  # beside nothing larger: no stray
    x = normal(3, 64, dtype=BF16)
    assert_rounded(
        packed_linear(x, packed(weights), out_dtype=F32), x.double() @ weights.to(DEVICE).double().T, 1e-12
    )


@pytest.mark.parametrize("depth", [64, 2048])
def test_one_row_in_the_order_of_the_draft(depth: int) -> None:
    """Blocks of a row product: whole turns, masked ones, several strays; a vocabulary of no whole strips."""
    weights = weights_of(37, depth, 17)
    weight, x, bias = packed(weights), normal(1, depth, dtype=BF16), normal(37, dtype=BF16, seed=2)
    exact = x.double() @ weights.to(DEVICE).double().T + bias.double()
    for blocks in (OneRow(4, 2048, 4), OneRow(8, 128, 2), OneRow(2, 256, 2)):
        found = packed_row(x, weight, bias, out_dtype=F32, blocks=blocks)
        assert_rounded(found, exact, slack(x, weights.to(DEVICE)))
    exact_row = packed_linear(x, weight, bias, out_dtype=F32)
    assert torch.equal(packed_row(x, weight, bias, out_dtype=F32), exact_row) == (depth != 2048)


@pytest.mark.parametrize(
    "tile", [Tile(16, 1, 64, 1, 5), Tile(32, 4, 128, 4, 3), Tile(16, 2, 256, 4, 2)], ids=str
)
def test_other_blocks_give_the_same_product(tile: Tile) -> None:
    check(normal(19, 320, dtype=BF16), weights_of(70, 320, 3), tile=tile)


@settings(max_examples=8)
@given(st.integers(1, 72), st.integers(1, 70), st.integers(1, 5), st.integers(0, 20), st.integers(0, 99))
def test_products_of_any_shape(rows: int, columns: int, tiles: int, strays: int, seed: int) -> None:
    x = in_nan(normal(rows, 64 * tiles, dtype=BF16, seed=seed))
    check(x, weights_of(columns, 64 * tiles, strays, seed + 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_row_is_the_same_whatever_rides_along(columns: int, depth: int) -> None:
    x, weight = normal(72, depth, dtype=BF16), packed(weights_of(columns, depth, 5))
    bias = normal(columns, dtype=BF16, seed=2)
    whole = packed_linear(x, weight, bias, out_dtype=F32)
    for rows in ROWS:
        for first in (0, 72 - rows):
            part = packed_linear(x[first : first + rows], weight, bias, out_dtype=F32)
            assert torch.equal(part, whole[first : first + rows]), (rows, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "depth"), REAL)
def test_heads_of_real_models(columns: int, depth: int) -> None:
    weights = weights_of(columns, depth, 2)
    weight, whole, x = packed(weights), weights.to(DEVICE), normal(72, depth, dtype=BF16)
    bias = normal(columns, dtype=BF16, seed=2)
    exact = x.double() @ whole.double().T + bias.double()
    limit = slack(x, whole)
    found, plain = packed_linear(x, weight, bias), linear(x, whole, bias)
    assert_rounded(found, exact, limit)
    assert_rounded(packed_row(x[:1], weight, bias), exact[:1], limit[:1])
    # no further off than the product with 16-bit weights, and seldom another number
    assert (found != plain).float().mean() < 0.02
    assert ((found.double() - exact).norm() < 1.001 * (plain.double() - exact).norm()).item()
    wide = packed_linear(x, weight, bias, out_dtype=F32)
    for rows in ROWS:
        for first in {0, (72 - rows) // 2, 72 - rows}:
            at = slice(first, first + rows)
            assert torch.equal(packed_linear(x[at], weight, bias), found[at]), (rows, first)
            assert torch.equal(packed_linear(x[at], weight, bias, out_dtype=F32), wide[at]), (rows, first)


def test_what_does_not_fit_is_a_programmer_s_error() -> None:
    weight = packed(weights_of(16, 64))
    with pytest.raises(AssertionError, match="128 columns, not 64"):
        packed_linear(normal(1, 128, dtype=BF16), weight)
    with pytest.raises(AssertionError, match="float16"):
        packed_linear(normal(1, 64, dtype=torch.float16), weight)
    with pytest.raises(AssertionError, match="2 rows"):
        packed_row(normal(2, 64, dtype=BF16), weight)
