"""The processor's matrix unit in plain code, for processors that have none: takes the place of the functions
of localmoe.kernels.cpu.matrix_unit that write its instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from localmoe.kernels.cpu import matrix_unit
from localmoe.kernels.cpu.matrix_unit import ROW_BYTES, SIDE, TILE_BYTES
from localmoe.kernels.cpu.vector_loops import F32, I8, I16, I32, I64, const, load_at, loop

_WORDS = ir.VectorType(I32, SIDE)
_NAME = "registers.of.the.unit"
_SUMS = ir.VectorType(F32, SIDE)


def _register(builder: Any, number: int) -> Any:
    """Address of what stands for a register, in the function that is being written."""
    for instruction in builder.function.entry_basic_block.instructions:
        if instruction.name == _NAME:
            return builder.add(builder.ptrtoint(instruction, I64), const(number * TILE_BYTES))
    raise AssertionError("the unit is used before it is configured")


def configure(builder: Any) -> None:
    names = [each.name for each in builder.function.entry_basic_block.instructions]
    if _NAME not in names:
        cgutils.alloca_once(builder, ir.ArrayType(I8, 8 * TILE_BYTES), name=_NAME)
    whole = builder.inttoptr(_register(builder, 0), ir.ArrayType(I8, 8 * TILE_BYTES).as_pointer())
    builder.store(ir.Constant(ir.ArrayType(I8, 8 * TILE_BYTES), bytearray(8 * TILE_BYTES)), whole)


def release(builder: Any) -> None:
    pass


def _copy(builder: Any, source: Any, from_pitch: int, target: Any, to_pitch: int) -> None:
    for row in range(SIDE):
        words = load_at(builder, builder.add(source, const(row * from_pitch)), _WORDS, 4)
        place = builder.inttoptr(builder.add(target, const(row * to_pitch)), _WORDS.as_pointer())
        builder.store(words, place).align = 4


def load(builder: Any, register: int, address: Any, stride: int = ROW_BYTES) -> None:
    _copy(builder, address, stride, _register(builder, register), ROW_BYTES)


def store(builder: Any, register: int, address: Any, stride: int = ROW_BYTES) -> None:
    _copy(builder, _register(builder, register), ROW_BYTES, address, stride)


def multiply_add(builder: Any, into: int, a: int, b: int) -> None:
    """One product after the other, in float32."""
    sums_at, a_at, b_at = (_register(builder, number) for number in (into, a, b))

    def of_row(m: Any, _: list[Any]) -> list[Any]:
        place = builder.add(sums_at, builder.mul(m, const(ROW_BYTES)))
        row = builder.add(a_at, builder.mul(m, const(ROW_BYTES)))

        def turn(k: Any, sums: list[Any]) -> list[Any]:
            words = load_at(builder, builder.add(b_at, builder.mul(k, const(ROW_BYTES))), _WORDS, 4)
            (found,) = sums
            for second in (0, 1):
                at = builder.add(row, builder.add(builder.shl(k, const(2)), const(2 * second)))
                bits = builder.shl(builder.zext(load_at(builder, at, I16, 2), I32), I32(16))
                number = builder.bitcast(bits, F32)
                of_b = builder.and_(words, _every(0xFFFF0000)) if second else builder.shl(words, _every(16))
                spread = builder.insert_element(ir.Constant(_SUMS, ir.Undefined), number, I32(0))
                spread = builder.shuffle_vector(
                    spread, spread, ir.Constant(ir.VectorType(I32, SIDE), [0] * SIDE)
                )
                found = builder.fadd(found, builder.fmul(spread, builder.bitcast(of_b, _SUMS)))
            return [found]

        (total,) = loop(builder, const(0), const(SIDE), 1, [load_at(builder, place, _SUMS, 4)], turn)
        builder.store(total, builder.inttoptr(place, _SUMS.as_pointer())).align = 4
        return []

    loop(builder, const(0), const(SIDE), 1, [], of_row)


def _every(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * SIDE)


def emulate() -> None:
    """In this process, before any code is compiled."""
    for function in (configure, release, load, store, multiply_add):
        assert hasattr(matrix_unit, function.__name__)
        setattr(matrix_unit, function.__name__, function)
