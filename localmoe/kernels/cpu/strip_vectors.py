"""What vectors of a strip of 16 rows have in common, whatever their weights are coded in (MXFP4, BF12, FP8):
a row of a tile has eight words of 32 bits, in FP8 sixteen; a vector has the words of one row, of two, or of a
part of one. Decodes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from localmoe.kernels.cpu.processor import LANES
from localmoe.kernels.cpu.vector_loops import F32, I8, I32, VECTOR, const, load_at, total


def rows_together(words: int) -> int:
    """Rows of a vector, where a row has so many words."""
    return max(1, LANES // words)


def row_parts(words: int) -> int:
    """Vectors of a row."""
    return max(1, words // LANES)


WORDS = 8  # of a row in a tile, of a plane where it has several; not of FP8
TOGETHER, PARTS = rows_together(WORDS), row_parts(WORDS)
INTS = ir.VectorType(I32, LANES)
BYTES = ir.VectorType(I8, 4 * LANES)


def unpacked(builder: Any, low: Any, high: Any, first: int) -> Any:
    """Words of two pairs of bytes: of every 16 bytes those from `first` on, 0 or 8, as the processor's own
    instruction takes them."""
    places = [16 * lane + first + i for lane in range(LANES // 4) for i in range(8)]
    order = [place + 4 * LANES * which for place in places for which in range(2)]
    mask = ir.Constant(ir.VectorType(I32, 4 * LANES), order)
    return builder.bitcast(builder.shuffle_vector(low, high, mask), INTS)


def halves(builder: Any, pairs: Any) -> list[Any]:
    """float32 of both halves of bfloat16 pairs."""
    shift, mask = (ir.Constant(INTS, [number] * LANES) for number in (16, 0xFFFF0000))
    found = builder.shl(pairs, shift), builder.and_(pairs, mask)
    return [builder.bitcast(half, VECTOR) for half in found]


def activations(builder: Any, token: Any, step: int, part: int, pairwise: bool, words: int = WORDS) -> Any:
    """Those of a row's words, for all rows of a vector. token: address of those of the tile's columns. step:
    of the vectors that a vector of words is decoded to. words: of a row."""
    address = builder.add(token, const(4 * (step * words + part * LANES)))
    count = min(LANES, words)
    loaded = load_at(builder, address, ir.VectorType(I32 if pairwise else F32, count), 4)
    if count == LANES:
        return loaded
    lanes = ir.Constant(INTS, [lane % count for lane in range(LANES)])
    return builder.shuffle_vector(loaded, loaded, lanes)


def ahead_of(builder: Any, tile: Any, tiles: Any, far: int, here: Any, following: Any, size: int) -> Any:
    """Address of what belongs to the tile that comes `far` tiles later: of `tiles`, `size` bytes each, that
    begin at `here`, or of those that are read after them, at `following`."""
    b = builder
    ahead = b.add(tile, const(far))
    beyond = b.sub(ahead, tiles)
    inside = b.add(here, b.mul(ahead, const(size)))
    outside = b.add(following, b.mul(beyond, const(size)))
    return b.select(b.icmp_signed("<", beyond, const(0)), inside, outside)


def store_totals(
    builder: Any, sums: list[Any], tokens: int, out: Any, pitch: Any, factors: Sequence[Sequence[Any]] = (),
    together: int = TOGETHER,
) -> None:  # fmt: skip
    """Write the sum of each row and token. sums: a vector for some rows `together` and a token each. out,
    pitch: address of float32 (16, at least tokens) and its bytes a row. factors: for each row what its
    sums are multiplied by, one after the other."""
    for i, vector in enumerate(sums):
        first, token = divmod(i, tokens)
        for j, number in enumerate(_row_totals(builder, vector, together)):
            row = first * together + j
            for factor in factors[row] if factors else ():
                number = builder.fmul(number, factor)
            cell = builder.add(builder.add(out, builder.mul(pitch, const(row))), const(4 * token))
            builder.store(number, builder.inttoptr(cell, F32.as_pointer()))


def _row_totals(builder: Any, vector: Any, together: int) -> list[Any]:
    """The sum of each row of a vector."""
    if together == 1:
        return [total(builder, vector)]
    words = LANES // together
    parts = [
        ir.Constant(ir.VectorType(I32, words), list(range(first, first + words)))
        for first in range(0, LANES, words)
    ]
    return [total(builder, builder.shuffle_vector(vector, vector, part)) for part in parts]


def bits_of(builder: Any, number: Any, *parts: tuple[int, int]) -> Any:
    """An int64 of some bits of another one, from its lowest on: (first, count) each."""
    whole, up = const(0), 0
    for first, count in parts:
        found = builder.and_(builder.lshr(number, const(first)), const((1 << count) - 1))
        whole = builder.or_(whole, builder.shl(found, const(up)))
        up += count
    return whole
