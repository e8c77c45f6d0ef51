"""Instructions of the processor's matrix unit (Intel's AMX) as LLVM code: eight registers, each a tile of 16
rows of 16 words of 32 bits. Knows no weights.

They are written as assembly, with registers named, as LLVM gives those to nobody else. A thread configures
the unit before it uses it, and releases it at once: what its registers hold goes with every switch of
threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from localmoe.kernels.cpu.vector_loops import I8, I64, const

SIDE = 16  # rows of a tile, and words of one
ROW_BYTES = 4 * SIDE
TILE_BYTES = SIDE * ROW_BYTES
_REGISTERS = 8
# the configuration: palette 1, from byte 16 on each register's bytes a row, from byte 48 on its rows
_CONFIGURATION = [
    *[1, *[0] * 15], *[ROW_BYTES, 0] * _REGISTERS, *[0] * 16, *[SIDE] * _REGISTERS, *[0] * 8,
]  # fmt: skip


def _emit(builder: Any, text: str, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.asm(kind, text, ",".join(["r"] * len(arguments) + ["~{memory}"]), arguments, True)


def configure(builder: Any) -> None:
    """Whole tiles from here on; registers hold zeros."""
    words = ir.ArrayType(I8, len(_CONFIGURATION))
    held = cgutils.alloca_once_value(builder, ir.Constant(words, bytearray(_CONFIGURATION)))
    _emit(builder, "ldtilecfg ($0)", [builder.ptrtoint(held, I64)])


def release(builder: Any) -> None:
    """The thread is done with the unit."""
    _emit(builder, "tilerelease", [])


def load(builder: Any, register: int, address: Any, stride: int = ROW_BYTES) -> None:
    """A tile from memory. stride: bytes from a row to the next one."""
    _emit(builder, f"tileloadd ($0,$1,1), %tmm{register}", [address, const(stride)])


def store(builder: Any, register: int, address: Any, stride: int = ROW_BYTES) -> None:
    """A tile to memory."""
    _emit(builder, f"tilestored %tmm{register}, ($0,$1,1)", [address, const(stride)])


def multiply_add(builder: Any, into: int, a: int, b: int) -> None:
    """into[m, n] += the sum over k of a[m, k] * b[k, n], of words that are bfloat16 pairs, products of the
    first ones and of the second ones; float32 sums. Subnormals count as zero."""
    _emit(builder, f"tdpbf16ps %tmm{b}, %tmm{a}, %tmm{into}", [])
