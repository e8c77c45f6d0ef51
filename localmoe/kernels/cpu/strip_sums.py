"""What becomes of a strip's sums for many tokens, float32 (16, SUMS_TOKENS) of one thread: strays are added,
activations computed, rounded and laid out for the next product, or written to their tokens' rows; 16 tokens
at a time. Addresses are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.cpu.bf12_vectors import RAISED
from localmoe.kernels.cpu.exponential import exponential
from localmoe.kernels.cpu.gathered_rows import SUMS_TOKENS, group_rows, turned
from localmoe.kernels.cpu.matrix_unit import ROW_BYTES, SIDE
from localmoe.kernels.cpu.vector_loops import F32, I8, I32, LINE, VECTOR, const, load_at, loop, spread

PITCH = 4 * SUMS_TOKENS  # bytes of a row of sums
_INTS = ir.VectorType(I32, SIDE)
_SUMS = ir.VectorType(F32, SIDE)


def _ints(number: int) -> Any:
    return ir.Constant(_INTS, [number] * SIDE)


def _floats(number: float) -> Any:
    return ir.Constant(_SUMS, [number] * SIDE)


def _store(builder: Any, vector: Any, address: Any, align: int = LINE) -> None:
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer())).align = align


def _each_group(builder: Any, groups: Any, turn: Callable[[Any], None]) -> Any:
    """turn(bytes from the first group's numbers to this one's) for each of the groups."""

    def one(group: Any, _: list[Any]) -> list[Any]:
        turn(builder.mul(group, const(ROW_BYTES)))
        return []

    loop(builder, const(0), groups, 1, [], one)
    return ir.Constant(I8, 0)


@intrinsic
def add_column(context: Any, words: Any, second: Any, step: Any, groups: Any, weight: Any, sums: Any) -> Any:
    """sums[t] += weight * x[t], of tokens whose RAISED activation is the first or the `second` bfloat16 of a
    word. words, step: address of the first group's, and bytes to the next group's."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        b = builder
        words, second, step, groups, weight, sums = arguments
        shift = b.trunc(b.sub(const(16), b.shl(second, const(4))), I32)  # 16 for the first, 0
        shifts = b.insert_element(ir.Constant(_INTS, ir.Undefined), shift, ir.Constant(I32, 0))
        shifts = b.shuffle_vector(shifts, shifts, _ints(0))
        weights = spread(b, weight)

        def turn(begin: Any) -> None:
            at = b.add(words, b.mul(b.lshr(begin, const(6)), step))
            bits = b.and_(b.shl(load_at(b, at, _INTS, LINE), shifts), _ints(0xFFFF0000))
            x = b.fmul(b.bitcast(bits, _SUMS), _floats(1 / RAISED))
            place = b.add(sums, begin)
            _store(b, b.fadd(load_at(b, place, _SUMS, LINE), b.fmul(weights, x)), place)

        return _each_group(b, groups, turn)

    assert ROW_BYTES == 1 << 6
    return types.int8(*[types.int64] * 4, types.float32, types.int64), generate


@intrinsic
def silu_rows(context: Any, gate: Any, up: Any, groups: Any, limit: Any) -> Any:
    """gate[r, t] = silu(gate[r, t]) * up[r, t] for 16 rows, both limited as products.activate has it."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        b = builder
        gate, up, groups, limit = arguments
        most = spread(b, limit)
        least = b.fneg(most)

        def turn(begin: Any) -> None:
            for row in range(SIDE):
                place = b.add(b.add(gate, begin), const(row * PITCH))
                g = load_at(b, place, _SUMS, LINE)
                u = load_at(b, b.add(b.add(up, begin), const(row * PITCH)), _SUMS, LINE)
                g = b.select(b.fcmp_ordered(">", g, most), most, g)
                u = b.select(b.fcmp_ordered(">", u, most), most, u)
                u = b.select(b.fcmp_ordered("<", u, least), least, u)
                is_low = b.fcmp_ordered("<", g, _floats(0.0))
                e = exponential(b, b.select(is_low, g, b.fneg(g)))  # of a number that is not above 0
                part = b.fdiv(b.select(is_low, e, _floats(1.0)), b.fadd(e, _floats(1.0)))
                _store(b, b.fmul(b.fmul(g, part), u), place)

        return _each_group(b, groups, turn)

    assert VECTOR == _SUMS, "the matrix unit's processors have vectors as wide as its rows"
    return types.int8(types.int64, types.int64, types.int64, types.float32), generate


@intrinsic
def put_pair(context: Any, sums: Any, groups: Any, into: Any, step: Any) -> Any:
    """Two rows of sums, RAISED and rounded to bfloat16, as the words of a group each. sums: address of the
    first row. into, step: address of the first group's words, and bytes to the next group's."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        b = builder
        sums, groups, into, step = arguments

        def rounded(address: Any) -> Any:
            number = b.fmul(load_at(b, address, _SUMS, LINE), _floats(RAISED))
            bits = b.bitcast(number, _INTS)
            near = b.add(b.add(bits, _ints(0x7FFF)), b.and_(b.lshr(bits, _ints(16)), _ints(1)))
            return b.select(b.fcmp_unordered("uno", number, number), _ints(0x7FC00000), near)

        def turn(begin: Any) -> None:
            first, second = (rounded(b.add(b.add(sums, begin), const(row * PITCH))) for row in (0, 1))
            word = b.or_(b.lshr(first, _ints(16)), b.and_(second, _ints(0xFFFF0000)))
            _store(b, word, b.add(into, b.mul(b.lshr(begin, const(6)), step)))

        return _each_group(b, groups, turn)

    return types.int8(*[types.int64] * 4), generate


@intrinsic
def put_rows(context: Any, sums: Any, rows: Any, count: Any, out: Any, pitch: Any) -> Any:
    """out[rows[t], r] = sums[r, t] for 16 sums of each of `count` tokens. rows: address of their int32
    numbers. out, pitch: address of float32 and its bytes a row."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        b = builder
        sums, rows, count, out, pitch = arguments

        def group(first: Any, _: list[Any]) -> list[Any]:
            begin = b.add(sums, b.shl(first, const(2)))
            found = [load_at(b, b.add(begin, const(row * PITCH)), _SUMS, LINE) for row in range(SIDE)]
            places = group_rows(b, out, pitch, rows, first, count)  # the last one's may be written again
            for numbers, place in zip(turned(b, found), places, strict=True):
                _store(b, numbers, place, 4)
            return []

        loop(b, const(0), count, SIDE, [], group)
        return ir.Constant(I8, 0)

    return types.int8(*[types.int64] * 5), generate
