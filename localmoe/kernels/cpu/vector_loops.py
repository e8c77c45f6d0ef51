"""Pieces of LLVM code that tiles of products are made of: counted loops that carry vectors, loads, ordered
sums. Knows no matrices.

numba's own loops cannot say what a product of a few rows lives on: that the next rows are fetched while these
are multiplied, and that one load serves several sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from localmoe.kernels.cpu.processor import LANES

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
LINE = 64  # bytes that come from memory at once


def const(number: int) -> Any:
    return ir.Constant(I64, number)


def zeros(count: int) -> list[Any]:
    """`count` vectors of zeros."""
    return [ir.Constant(VECTOR, [0.0] * LANES)] * count


def load_at(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """A `kind` at an int64 address."""
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def keep_order(builder: Any) -> None:
    """No instruction, but LLVM moves no load from one side of it to the other."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def row_addresses(builder: Any, base: Any, pitch: Any, rows: Any, count: int) -> list[Any]:
    """Addresses of `count` rows of `pitch` bytes; `rows`: address of their int32 numbers."""
    places = [load_at(builder, builder.add(rows, const(4 * i)), I32, 4) for i in range(count)]
    return [builder.add(base, builder.mul(builder.sext(place, I64), pitch)) for place in places]


def loop(
    builder: Any, start: Any, end: Any, step: int, carried: Sequence[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:  # fmt: skip
    """for k in range(start, end, step): carried = body(k, carried). What is carried in the end."""
    before, function = builder.block, builder.function
    inside, after = function.append_basic_block("tile"), function.append_basic_block("tile.end")
    builder.cbranch(builder.icmp_signed("<", start, end), inside, after)
    builder.position_at_end(inside)
    k = builder.phi(I64)
    k.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    following = body(k, list(values))
    last, behind = builder.add(k, const(step)), builder.block
    k.add_incoming(last, behind)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, behind)
    builder.cbranch(builder.icmp_signed("<", last, end), inside, after)
    builder.position_at_end(after)
    ends = []
    for value, new in zip(carried, following, strict=True):
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phi.add_incoming(new, behind)
        ends.append(phi)
    return ends


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the processor can."""
    return builder.fadd(c, builder.fmul(a, b, flags=("contract",)), flags=("contract",))


def multiply_add_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """c and the products of bfloat16 pairs, two for each lane, see processor.HAS_BF16_DOTS."""
    kind = ir.FunctionType(VECTOR, [a.type, b.type, VECTOR])
    return builder.asm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0", [a, b, c], False)


def widened(builder: Any, words: Any, is_bfloat: bool) -> Any:
    """float32 vector of a vector of 16-bit floats."""
    if is_bfloat:
        wide = ir.VectorType(I32, LANES)
        shift = ir.Constant(wide, [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(words, wide), shift), VECTOR)
    return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), LANES)), VECTOR)


def spread(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def total(builder: Any, vector: Any) -> Any:
    """The sum of a vector's numbers, halves first: always in the same order."""
    count = vector.type.count
    while count > 1:
        count //= 2
        low = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        high = ir.Constant(ir.VectorType(I32, count), list(range(count, 2 * count)))
        vector = builder.fadd(
            builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high)
        )
    return builder.extract_element(vector, ir.Constant(I32, 0))
