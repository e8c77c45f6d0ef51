"""What Triton's interpreter replays gives what it would give anew: of other operands, and of operands that
decide by their numbers what is done."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.interpreted


@triton.jit
def _squares_and_products(a, b, out, count):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x * x)
    tl.store(out + 4 + at, x * y)
    tl.store(out + 8 + at, tl.load(a + at, mask=at < count, other=-1.0))
    tl.store(out + 12 + at, tl.where(at < count, x, y))


def test_one_value_twice_is_told_from_two() -> None:
    a, b, out = torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6, 7, 8]), torch.zeros(16)
    for count in (3, 1):
        _squares_and_products[(1,)](a, b, out, count)
        kept = torch.arange(4) < count
        wanted = [a * a, a * b, torch.where(kept, a, -1.0), torch.where(kept, a, b)]
        assert torch.equal(out, torch.cat(wanted))


@triton.jit  # type: ignore[untyped-decorator]
def _single_numbers(a, out, WHICH: tl.constexpr):  # type: ignore[no-untyped-def]
    for place in range(3):
        other = tl.load(a + place)
        tl.store(out + place, tl.load(a + 3, mask=other > 10, other=other))
        tl.store(out + 3 + place, tl.load(a + 3, mask=other < 2, other=-7.0), mask=other != 1)


def test_single_numbers_decide_each_time() -> None:
    """An `other` of 0 is left out by the interpreter: what follows is not that of the next one, which is."""
    out = torch.full((6,), 9.0)
    _single_numbers[(1,)](torch.tensor([0.0, 1.0, 20.0, 5.0]), out, 0)
    assert out.tolist() == [0, 1, 5, 5, 9, -7]


@triton.jit  # type: ignore[untyped-decorator]
def _constants(out, number, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)
    if EVEN:
        at = tl.multiple_of(at, 4)
    tl.store(out + at, at * 1)
    tl.store(out + 4 + at, at * 1.5)
    tl.store(out + 8 + at, at + number)
    tl.store(out + 12 + at, (at + number).to(tl.int8))
    tl.store(out + 16 + at, tl.program_id(0))


def test_constants_and_types_are_told_apart() -> None:
    for number in (7, 300):
        for even in (True, False):
            out = torch.full((20,), 9.0)
            _constants[(2,)](out, number, even)
            at = torch.arange(4.0)
            narrow = torch.from_numpy((np.arange(4) + number).astype(np.int8)).float()
            assert torch.equal(out, torch.cat([at, at * 1.5, at + number, narrow, torch.ones(4)]))


@triton.jit
def _halves(a, out):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 2)
    tl.store(out + at, tl.load(a + at).to(tl.float32).to(tl.bfloat16))


@pytest.mark.parametrize("bits", [[0x0000, 0x8000], [0x3F81, 0xC2F7], [0x7F80, 0xFF80], [0x7FC1, 0x0080]])
def test_numbers_of_16_bits_come_back(bits: list[int]) -> None:
    a = torch.tensor(bits, dtype=torch.uint16).view(torch.bfloat16)
    out = torch.zeros_like(a)
    _halves[(1,)](a, out)
    assert out.view(torch.uint16).tolist() == bits


@triton.jit
def _shifted(a, out):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)
    x = tl.load(a + at)
    tl.store(out + at, x >> 1)
    tl.store(out + 4 + at, x.to(tl.uint32, bitcast=True) >> 1)
    tl.store(out + 8 + at, x & at)
    tl.store(out + 12 + at, x - (x // 3) * 3 == x % 3)


def test_what_is_shifted_keeps_its_sign_by_its_type() -> None:
    a, out = torch.tensor([-8, 7, -5, 1 << 30], dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    for _ in range(2):
        _shifted[(1,)](a, out)
        wide = (a.to(torch.int64) & 0xFFFFFFFF) >> 1
        assert torch.equal(out, torch.cat([a >> 1, wide, a & torch.arange(4), torch.ones_like(a)]))
