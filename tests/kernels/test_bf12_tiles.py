"""What is packed into twelve bits comes back bit by bit, or packing says that it cannot be done."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels import bf12_tiles
from localmoe.kernels.bf12_tiles import NOWHERE, Bf12Matrix, UnpackableError


def empty(rows: int, columns: int) -> Bf12Matrix:
    """In memory full of ones."""
    codes, side = bf12_tiles.code_bytes(rows, columns), 4 * bf12_tiles.side_words(rows, columns)
    memory = torch.full((codes + side,), 255, dtype=torch.uint8)
    assert len(memory) == bf12_tiles.num_bytes(rows, columns)
    return Bf12Matrix.at(memory[:codes], memory[codes:], rows, columns)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def strays_of(weights: Tensor) -> list[int]:
    """Of each strip, by the definition: of each row all numbers but zeros that the best window of 15
    exponents leaves out."""
    exponents = weights.view(torch.int16).numpy().astype(np.int64) >> 7 & 255
    zero = weights.float().numpy() == 0
    counts = []
    for row, nothing in zip(exponents, zero, strict=True):
        used = row[~nothing]
        best = max(int(((used > top - 15) & (used <= top) & (used > 0)).sum()) for top in range(15, 255))
        counts.append(len(used) - best)
    return [sum(counts[first : first + 16]) for first in range(0, len(counts), 16)]


SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3.3e38, 1.2e-38)


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(-126, 100), st.integers(0, 10**6), st.integers(0, 9))
@example(1, 1, 0, 0, 0)
@example(2, 1, -126, 1, 9)  # where exponents end
@example(2, 3, 100, 2, 9)
def test_what_is_packed_comes_back(strips: int, tiles: int, power: int, seed: int, special: int) -> None:
    chance = np.random.default_rng(seed)
    rows, columns = 16 * strips, 64 * tiles
    numbers = torch.tensor(chance.standard_normal((rows, columns)) * 2.0**power).to(torch.bfloat16)
    for value in SPECIAL[:special]:
        numbers[chance.integers(rows), chance.integers(columns)] = value
    numbers[int(chance.integers(rows))] = 0
    room = bf12_tiles.stray_room(columns)
    matrix = empty(rows, columns)
    if max(strays_of(numbers)) > room:
        with pytest.raises(UnpackableError):
            matrix.put(0, numbers)
        return
    for first in range(0, rows, 16):
        matrix.put(first, numbers[first : first + 16])
    assert same_bits(matrix.take(), numbers) and same_bits(matrix._take_by_pytorch(), numbers)
    # a row may keep some more than need be where they are few
    found = (matrix.places != NOWHERE).sum(1).tolist()
    spare = 16 * -(-columns // 256)
    for least, count in zip(strays_of(numbers), found, strict=True):
        assert least <= count <= least + spare


def test_normal_weights_have_few_strays() -> None:
    weights = (torch.randn(64, 2048, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    matrix = empty(64, 2048)
    matrix.put(0, weights)
    count = int((matrix.places != NOWHERE).sum())
    assert 5 <= count <= 64 * 2048 // 2500 and same_bits(matrix.take(), weights)
    assert bf12_tiles.num_bytes(1408, 2048) * 8 / (1408 * 2048) < 12.2


def test_a_window_that_leaves_out_a_giant_is_found() -> None:
    weights = (torch.randn(16, 1024, generator=torch.Generator().manual_seed(2)) * 0.02).to(torch.bfloat16)
    weights[:, 5] = 2.0**40
    matrix = empty(16, 1024)
    matrix.put(0, weights)
    assert int((matrix.places != NOWHERE).sum()) < 32 and same_bits(matrix.take(), weights)


def test_too_many_rare_exponents_are_refused() -> None:
    weights = torch.ones(16, 64, dtype=torch.bfloat16)
    weights[0] = (2.0 ** torch.arange(-60, 68, 2)).to(torch.bfloat16)
    with pytest.raises(UnpackableError, match="more than 32 of 16 x 64 weights"):
        empty(16, 64).put(0, weights)


@pytest.mark.parametrize("shape", [(8, 64), (16, 96), (16, 1 << 16)])
def test_what_cannot_be_tiled(shape: tuple[int, int]) -> None:
    assert not bf12_tiles.can_be_tiled(*shape)
