"""Numbers of a vector of codes in FP8 (kernels.fp8_tiles) and of their scales, as vector code, looked up as
the processor can. Multiplies no activations.

What meets these is the code's value itself, no multiple of it whose bits are the code's: the least ones of
those would be subnormal, which bfloat16 dot products take for zero, and others are slow with.
"""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import ir

from localmoe.kernels.cpu.atoms import call_llvm
from localmoe.kernels.cpu.processor import HAS_AVX512, HAS_BYTE_TABLES, HAS_LARGE_TABLES, LANES
from localmoe.kernels.cpu.strip_vectors import BYTES, halves, unpacked
from localmoe.kernels.cpu.vector_loops import F32, VECTOR, load_at, spread
from localmoe.kernels.fp8_tiles import TILE_COLUMNS, UP

WORDS = TILE_COLUMNS // 4  # of a row in a tile
_SIGN = 0x80
_SUBNORMALS = 8  # codes without an exponent, 0 among them: so many 2^-9 each
_LIFT = 60  # upper byte of 2^(exponent of a code), less the exponent's upper three bits


def _bytes(number: int) -> Any:
    return ir.Constant(BYTES, [number] * BYTES.count)


def _table(numbers: list[int]) -> Any:
    return ir.Constant(BYTES, numbers * (BYTES.count // len(numbers)))


def _value_bytes(code: int) -> tuple[int, int]:
    """Lower and upper byte of a code's value in bfloat16, without a sign."""
    exponent, mantissa = divmod(code, _SUBNORMALS)
    value = (mantissa + _SUBNORMALS * (exponent > 0)) * 2.0 ** (max(exponent, 1) - 10)
    low, high = struct.pack("<f", value)[2:]
    return low, high


def scales(builder: Any, address: Any, half: Any, part: int) -> list[Any]:
    """float32 of the scale that each lane's columns have: a tile's all have one. address: of the row's."""
    return [spread(builder, load_at(builder, address, F32, 4))]


def weights(builder: Any, address: Any, pairwise: bool) -> list[Any]:
    """What meets activations as they lie in their order, one vector after the other: bfloat16 pairs, or
    float32. address: of a vector of codes."""
    b = builder
    codes = load_at(b, address, BYTES, 4)
    if HAS_LARGE_TABLES:
        low, high = _by_large_tables(b, codes)
    elif HAS_BYTE_TABLES:
        low, high = _by_tables(b, codes)
    else:
        low, high = b.shl(codes, _bytes(4)), b.and_(b.lshr(codes, _bytes(4)), _bytes(7))
        high = b.or_(high, b.and_(codes, _bytes(_SIGN)))
    pairs = [unpacked(b, low, high, first) for first in (0, 8)]
    if pairwise:
        return pairs
    floats = [half for each in pairs for half in halves(b, each)]
    up = ir.Constant(VECTOR, [UP] * LANES)
    return floats if HAS_BYTE_TABLES else [b.fmul(each, up) for each in floats]


def order(pairwise: bool) -> tuple[tuple[int, int], ...]:
    """Of activations, see codings: numbers as unpacking leaves them, for each half of 16 bytes; of float32 a
    pair's first ones come before its second ones."""
    return ((0, 3), (4, 2), (3, 1)) if pairwise else ((1, 2), (4, 2), (0, 1), (3, 1))


def _by_large_tables(builder: Any, codes: Any) -> tuple[Any, Any]:
    """Lower and upper bytes of the codes' values, of tables of 128."""
    b, name = builder, "llvm.x86.avx512.vpermi2var.qi.512"
    low, high = (
        call_llvm(b, BYTES, name, _table(list(table[:64])), codes, _table(list(table[64:])))
        for table in zip(*map(_value_bytes, range(128)), strict=True)
    )
    return low, b.or_(high, b.and_(codes, _bytes(_SIGN)))


def _by_tables(builder: Any, codes: Any) -> tuple[Any, Any]:
    """The same of tables of 16: what a code's halves say, changed where there is no exponent."""
    b, name = builder, "llvm.x86.avx512.pshuf.b.512" if HAS_AVX512 else "llvm.x86.avx2.pshuf.b"
    uppers = [(half & 8) << 4 | (half & 7) + _LIFT for half in range(16)]
    found = [_value_bytes(code) for code in range(_SUBNORMALS)]
    low_changes = [0] * 8 + [low ^ code << 4 for code, (low, _) in enumerate(found)]
    high_changes = [0] * 8 + [high ^ _LIFT for _, high in found]
    # from 128 on, where there is an exponent: a look-up finds 0 there
    places = b.add(b.and_(codes, _bytes(_SIGN - 1)), _bytes(_SIGN - _SUBNORMALS))
    change_low, change_high, high = (
        call_llvm(b, BYTES, name, _table(table), at)
        for table, at in (
            (low_changes, places),
            (high_changes, places),
            (uppers, b.lshr(codes, _bytes(4))),
        )
    )
    return b.xor(b.shl(codes, _bytes(4)), change_low), b.xor(high, change_high)
