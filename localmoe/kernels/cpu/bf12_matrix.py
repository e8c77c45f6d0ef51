"""Products of a strip of 16 rows of a matrix in BF12 (kernels.bf12_tiles) with many tokens at once, by the
processor's matrix unit (matrix_unit): weights are decoded once for up to 64 tokens, into a piece of memory
that stays in the first cache, from where the unit takes them.

Numbers, factors and what is left out are as in bf12_dots; only the order of sums is another one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from localmoe.kernels.bf12_tiles import TILE_ROWS
from localmoe.kernels.cpu import matrix_unit
from localmoe.kernels.cpu.atoms import prefetch
from localmoe.kernels.cpu.bf12_dots import sum_factors
from localmoe.kernels.cpu.bf12_vectors import TILE_BYTES, weights
from localmoe.kernels.cpu.gathered_rows import SUMS_TOKENS
from localmoe.kernels.cpu.matrix_unit import ROW_BYTES, SIDE
from localmoe.kernels.cpu.strip_sums import PITCH
from localmoe.kernels.cpu.strip_vectors import INTS, TOGETHER, WORDS
from localmoe.kernels.cpu.vector_loops import F32, I8, I32, LINE, const, load_at, loop, spread

MOST_GROUPS = SUMS_TOKENS // SIDE  # of 16 tokens each
_HALVES = 2  # tiles of the unit that a tile of weights is decoded to: 16 rows of 32 columns
_DECODED = _HALVES * matrix_unit.TILE_BYTES
_SUMS = ir.VectorType(F32, SIDE)


def _decode(builder: Any, at: Any, into: Any) -> None:
    """A tile's weights as bfloat16 pairs, half by half, row by row: words in the order that activations lie
    in. at, into: addresses."""
    b, words = builder, list(range(WORDS))
    for row in range(0, TILE_ROWS, TOGETHER):
        found = weights(b, b.add(at, const(row * 4 * WORDS)), True)
        for half in range(_HALVES):
            steps = found[2 * half : 2 * half + 2]
            for i in range(TOGETHER):
                order = [*(i * WORDS + word for word in words), *(SIDE + i * WORDS + word for word in words)]
                line = b.shuffle_vector(*steps, ir.Constant(ir.VectorType(I32, SIDE), order))
                place = half * matrix_unit.TILE_BYTES + (row + i) * ROW_BYTES
                b.store(line, b.inttoptr(b.add(into, const(place)), INTS.as_pointer())).align = LINE


def _multiply_sums(builder: Any, out: Any, scales: Any, groups: int) -> None:
    for row, factors in enumerate(sum_factors(builder, scales, TILE_ROWS)):
        for group in range(groups):
            place = builder.add(out, const(row * PITCH + group * ROW_BYTES))
            numbers = load_at(builder, place, _SUMS, LINE)
            for factor in factors:
                numbers = builder.fmul(numbers, spread(builder, factor))
            builder.store(numbers, builder.inttoptr(place, _SUMS.as_pointer())).align = LINE


def make_products(groups: int) -> Any:
    """products(codes, scales, following, inputs, step, tiles, out): out[r][t] = row r of the strip . token t,
    for t < 16 * groups.

    Args:
        codes, scales, following: addresses of the strip's, and of the codes that are read next. inputs, step:
            address of the first group's activations (gathered_rows), and bytes from a group's to the next
            one's. tiles: of 64 columns, the first ones. out: address of float32 (16, SUMS_TOKENS).
    """

    @intrinsic
    def products(
        context: Any, codes: Any, scales: Any, following: Any, inputs: Any, step: Any, tiles: Any, out: Any
    ) -> Any:
        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            b = builder
            codes, scales, following, inputs, step, tiles, out = arguments
            room = cgutils.alloca_once(b, ir.ArrayType(I8, 2 * _DECODED + LINE))
            first = b.add(b.ptrtoint(room, tiles.type), const(LINE - 1))
            decoded = b.and_(first, const(-LINE))
            matrix_unit.configure(b)
            of_weights, of_tokens = MOST_GROUPS, MOST_GROUPS + _HALVES

            def turn(tile: Any, _: list[Any]) -> list[Any]:
                begin = b.mul(tile, const(TILE_BYTES))
                wanted = b.add(following, begin)
                for line in range(0, TILE_BYTES, LINE):
                    prefetch(b, b.add(wanted, const(line)), near=False)
                # in turn in two places, so that one is filled while the unit still reads the other
                here = b.add(decoded, b.mul(b.and_(tile, const(1)), const(_DECODED)))
                _decode(b, b.add(codes, begin), here)
                for half in range(_HALVES):
                    place = b.add(here, const(half * matrix_unit.TILE_BYTES))
                    matrix_unit.load(b, of_weights + half, place)
                at = b.add(inputs, b.mul(tile, const(_DECODED)))
                for group in range(groups):
                    for half in range(_HALVES):
                        place = b.add(at, const(half * matrix_unit.TILE_BYTES))
                        matrix_unit.load(b, of_tokens + half, place)
                        matrix_unit.multiply_add(b, group, of_weights + half, of_tokens + half)
                    at = b.add(at, step)
                return []

            loop(b, const(0), tiles, 1, [], turn)
            for group in range(groups):
                matrix_unit.store(b, group, b.add(out, const(group * ROW_BYTES)), PITCH)
            matrix_unit.release(b)
            _multiply_sums(b, out, scales, groups)
            return ir.Constant(I8, 0)

        return types.int8(*[types.int64] * 7), generate

    return products


products_1, products_2, products_3, products_4 = (make_products(n + 1) for n in range(MOST_GROUPS))
