"""Numbers of a vector of code words in INT4 (kernels.int4_tiles), their scales and zero points, as vector
code. Codes are looked up as those of MXFP4 (mxfp4_vectors), less what a zero point in the middle is: what
another one is more or less is multiplied with sums of activations, of which all rows have the same.
Multiplies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from localmoe.kernels.cpu import mxfp4_vectors
from localmoe.kernels.cpu.processor import LANES
from localmoe.kernels.cpu.strip_vectors import INTS, TOGETHER, WORDS
from localmoe.kernels.cpu.vector_loops import I32, VECTOR, const, load_at
from localmoe.kernels.int4_tiles import MIDDLE, TILE_ROWS, WORD_BYTES, ZERO_BITS

_VALUES = tuple(float(code - MIDDLE) for code in range(16))
_HALF = WORDS // 2  # code words that have a scale together, where it is for 32 columns


def _ints(number: int) -> Any:
    return ir.Constant(INTS, [number] * LANES)


def weights(builder: Any, address: Any, pairwise: bool) -> list[Any]:
    """As mxfp4_vectors.weights."""
    return mxfp4_vectors.weights(builder, address, pairwise, _VALUES)


def scales_by(words: Callable[[Any, Any, int], Any]) -> Callable[[Any, Any, Any, int], list[Any]]:
    """See codings. words: wide or narrow."""

    def scales(builder: Any, address: Any, _: Any, part: int) -> list[Any]:
        kept = builder.and_(words(builder, address, part), _ints(~ZERO_BITS))
        return [builder.bitcast(kept, VECTOR)]

    return scales


def shifts_by(words: Callable[[Any, Any, int], Any]) -> Callable[[Any, Any, int], list[Any]]:
    """See codings. words: wide or narrow."""

    def shifts(builder: Any, address: Any, part: int) -> list[Any]:
        zeros = builder.and_(words(builder, address, part), _ints(ZERO_BITS))
        return [builder.sitofp(builder.sub(_ints(MIDDLE), zeros), VECTOR)]

    return shifts


def wide(builder: Any, address: Any, part: int) -> Any:
    """The word of each lane, where all of a tile's row have one. address: of the first row's."""
    loaded = load_at(builder, address, ir.VectorType(I32, TOGETHER), 4)
    lanes = [min(lane // WORDS, TOGETHER - 1) for lane in range(LANES)]
    return builder.shuffle_vector(loaded, loaded, _ints_of(lanes))


def narrow(builder: Any, address: Any, part: int) -> Any:
    """The same, where each half of a tile's row has one, those of second halves behind the first ones'."""
    beyond = builder.add(address, const(TILE_ROWS * WORD_BYTES))
    first, second = (load_at(builder, at, ir.VectorType(I32, TOGETHER), 4) for at in (address, beyond))
    lanes = []
    for lane in range(LANES):
        row, half = min(lane // WORDS, TOGETHER - 1), (part * LANES + lane) % WORDS // _HALF
        lanes.append(half * TOGETHER + row)
    return builder.shuffle_vector(first, second, _ints_of(lanes))


def _ints_of(numbers: list[int]) -> Any:
    return ir.Constant(INTS, numbers)
