"""Numbers of a vector of a tile in BF12 (kernels.bf12_tiles), as vector code, and the order that activations
lie in to meet them. Multiplies nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.bf12_tiles import PLANES, TILE_COLUMNS, TILE_ROWS
from localmoe.kernels.cpu.strip_vectors import BYTES, WORDS, bits_of, halves, unpacked
from localmoe.kernels.cpu.vector_loops import const, load_at

PLANE_BYTES = 4 * WORDS * TILE_ROWS
TILE_BYTES = PLANES * PLANE_BYTES
RAISED = 2.0**64  # times as large as they are activations are kept


def _bytes(number: int) -> Any:
    return ir.Constant(BYTES, [number] * BYTES.count)


def weights(builder: Any, address: Any, pairwise: bool) -> list[Any]:
    """What meets activations as they lie in their `place`, one vector after the other: bfloat16 pairs, or
    float32; 2^-112 times the weights in units of their rows' scales. address: of a vector of the first
    plane."""
    b = builder
    first, second, upper = (
        load_at(b, b.add(address, const(plane * PLANE_BYTES)), BYTES, 4) for plane in range(PLANES)
    )
    sign = b.and_(b.shl(upper, _bytes(1)), _bytes(0x80))
    of_second = b.or_(sign, b.and_(b.lshr(upper, _bytes(3)), _bytes(0x07)))
    pairs = [
        unpacked(b, low, high, part)
        for low, high in ((first, b.and_(upper, _bytes(0x87))), (second, of_second))
        for part in (0, 8)
    ]
    return pairs if pairwise else [half for each in pairs for half in halves(b, each)]


@intrinsic
def place(context: Any, column: Any, x: Any) -> Any:
    """Where activation `column` lies in a row of `x`: numbers as unpacking bytes leaves them, for each of the
    planes and half of 16 bytes; where `x` has float32, a pair's first ones come before its second ones."""
    pairwise = x.dtype == types.uint16

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        c = arguments[0]  # bits: 2 of a byte in a word, which of two planes, 3 of a word
        if pairwise:
            inside = bits_of(builder, c, (0, 2), (3, 1), (5, 1), (4, 1), (2, 1))
        else:
            inside = bits_of(builder, c, (1, 1), (3, 1), (5, 1), (0, 1), (4, 1), (2, 1))
        return builder.or_(builder.and_(c, const(-TILE_COLUMNS)), inside)

    return types.int64(types.int64, x), generate
