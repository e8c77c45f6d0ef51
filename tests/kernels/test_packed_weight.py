"""A weight that is packed strip by strip comes back whole, and takes what it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.kernels.bf12_tiles import UnpackableError
from localmoe.kernels.packed_weight import PackedWeight, can_be_packed, packed_bytes, whole_strips

CPU = torch.device("cpu")


@settings(max_examples=20)
@given(st.integers(1, 90), st.integers(1, 3), st.sampled_from([16, 32, 48]), st.integers(0, 99))
def test_what_is_put_comes_back(rows: int, tiles: int, at_once: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, 64 * tiles, generator=chance).to(torch.bfloat16)
    packed = PackedWeight.empty(rows, 64 * tiles, CPU)
    packed.memory.fill_(-(1 << 20))
    for first in reversed(range(0, rows, at_once)):
        packed.put(first, weights[first : first + at_once])
    assert torch.equal(packed.take(), weights)
    assert packed.memory.nbytes == packed_bytes(rows, 64 * tiles)
    assert len(packed.codes) + len(packed.side) == len(packed.memory)
    assert packed.side.data_ptr() % 16 == packed.codes.data_ptr() % 16 == 0


def test_a_head_takes_three_quarters_and_a_little() -> None:
    for rows, columns in ((151_936, 2048), (201_088, 2880), (32_064, 4096)):
        assert 0.75 < packed_bytes(rows, columns) / (2 * rows * columns) < 0.766
    assert packed_bytes(33, 64) == packed_bytes(48, 64) and whole_strips(33) == 48


def test_parts_of_strips_are_no_pieces() -> None:
    packed = PackedWeight.empty(40, 64, CPU)
    with pytest.raises(AssertionError, match="rows 0, 20"):
        packed.put(0, torch.zeros(20, 64, dtype=torch.bfloat16))


def test_too_many_rare_exponents_are_refused() -> None:
    weights = torch.ones(8, 64, dtype=torch.bfloat16)
    weights[0] = (2.0 ** torch.arange(-60, 68, 2)).to(torch.bfloat16)
    with pytest.raises(UnpackableError, match="more than 32 of 16 x 64 weights"):
        PackedWeight.empty(8, 64, CPU).put(0, weights)


@pytest.mark.parametrize("shape", [(1000, 96), (1000, 1 << 16), (1 << 20, 1 << 15), (16, 0)])
def test_what_cannot_be_packed(shape: tuple[int, int]) -> None:
    assert not can_be_packed(*shape)


def test_a_stand_in_takes_no_memory() -> None:
    stand_in = PackedWeight.stand_in(151_936, 2048, CPU)
    assert stand_in.memory.untyped_storage().nbytes() == 4
    like = PackedWeight.empty(40, 64, CPU)
    assert (stand_in.codes.dtype, stand_in.side.dim()) == (like.codes.dtype, like.side.dim())
    assert stand_in.side.data_ptr() % 16 == 0
