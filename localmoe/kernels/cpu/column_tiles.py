"""Products of one, two or four tokens with a block of neighbouring columns of 16-bit or float32 weights, in
one pass over the rows; for matrices that lie (in, out).

A token's sums are the same whatever other tokens are with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.cpu.atoms import prefetch
from localmoe.kernels.cpu.processor import LANES
from localmoe.kernels.cpu.vector_loops import (
    F32,
    I8,
    I16,
    LINE,
    VECTOR,
    const,
    load_at,
    loop,
    multiply_add,
    row_addresses,
    spread,
    widened,
    zeros,
)

COLUMNS = LINE if LANES == 16 else LINE // 2  # of a tile: two lines of 16-bit weights, or one
MOST_TOKENS = 4 if LANES == 16 else 2  # sums of all columns and tokens stay in registers
_AHEAD = 8  # rows fetched before they are used


def _make(tokens: int) -> Any:
    vectors = COLUMNS // LANES

    @intrinsic
    def tile(
        context: Any, weights: Any, at: Any, stride: Any, base: Any, pitch: Any, rows: Any, length: Any,
        out: Any, out_pitch: Any,
    ) -> Any:  # fmt: skip
        is_bfloat, size = weights.dtype == types.uint16, weights.dtype.bitwidth // 8

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            at, stride, base, pitch, rows, length, out, out_pitch = arguments[1:]
            inputs = row_addresses(builder, base, pitch, rows, tokens)

            def turn(k: Any, sums: list[Any]) -> list[Any]:
                row = builder.add(at, builder.mul(k, stride))
                for line in range(size * COLUMNS // LINE):
                    far = builder.add(builder.mul(stride, const(_AHEAD)), const(LINE * line))
                    prefetch(builder, builder.add(row, far))
                kind = ir.VectorType(I16, LANES) if size == 2 else VECTOR
                places = [builder.add(row, const(size * LANES * v)) for v in range(vectors)]
                found = [load_at(builder, place, kind, size) for place in places]
                if size == 2:
                    found = [widened(builder, words, is_bfloat) for words in found]
                for t, address in enumerate(inputs):
                    x = load_at(builder, builder.add(address, builder.shl(k, const(2))), F32, 4)
                    x = spread(builder, x)
                    for v, weight in enumerate(found):
                        place = t * vectors + v
                        sums[place] = multiply_add(builder, weight, x, sums[place])
                return sums

            for place, vector in enumerate(loop(builder, const(0), length, 1, zeros(tokens * vectors), turn)):
                token, v = divmod(place, vectors)
                cell = builder.add(builder.mul(out_pitch, const(token)), const(4 * LANES * v))
                stored = builder.store(vector, builder.inttoptr(builder.add(out, cell), VECTOR.as_pointer()))
                stored.align = 4
            return ir.Constant(I8, 0)

        return types.int8(weights, *[types.int64] * 8), generate

    return tile


# tile(weights, at, stride, base, pitch, rows, length, out, out_pitch):
# out[t][j] = sum over k < length of x[rows[t], k] * weights[k, j], j < COLUMNS. weights: an array, for its
# dtype alone. at, stride: the columns' address and the bytes of a row of weights. base, pitch: address of
# float32 x and its bytes a row. rows: address of int32. out, out_pitch: the same of float32 out.
columns_1, columns_2, columns_4 = _make(1), _make(2), _make(4)
