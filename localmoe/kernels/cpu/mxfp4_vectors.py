"""Numbers of a vector of code words in MXFP4 (kernels.mxfp4_tiles) and of their scales, as vector code,
looked up as the processor can. Multiplies nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from localmoe.kernels.cpu.atoms import call_llvm
from localmoe.kernels.cpu.processor import HAS_AVX2, HAS_AVX512, LANES
from localmoe.kernels.cpu.strip_vectors import BYTES, INTS, TOGETHER, WORDS, halves, unpacked
from localmoe.kernels.cpu.vector_loops import I8, I16, I32, VECTOR, const, load_at

_WORD_PAIRS = 4
# whether codes are looked up byte by byte: where vectors have no table of 16 larger numbers
BY_BYTES = HAS_AVX2 and not HAS_AVX512
# of a sign, two bits of exponent and one of mantissa (FP4 E2M1)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # of each code
_DOUBLED = 0xC8643210  # the same times two, four bits each
_LEAST_POWER = 0x00400000  # 2^-127, for which the exponent's bits alone say zero


def _ints(numbers: Sequence[int] | int) -> Any:
    return ir.Constant(INTS, [numbers] * LANES if isinstance(numbers, int) else list(numbers))


def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def powers(builder: Any, address: Any, half: Any, part: int) -> list[Any]:
    """float32 of the scale that each lane's columns have. address: of a vector's rows' words."""
    b, size = builder, 4 * TOGETHER
    # two bytes before the word or at it, so that the ones for these columns are its last ones; what lies
    # before the first word are other scales or codes
    place = b.add(address, b.sub(b.shl(half, const(1)), const(2)))
    loaded = load_at(b, place, ir.VectorType(I8, size), 1)
    rows = [min(lane // WORDS, TOGETHER - 1) for lane in range(LANES)]
    blocks = [(part * LANES + lane) % WORDS // 4 for lane in range(LANES)]
    chosen = [
        4 * row + 2 + block if byte == 3 else size  # of the zeros
        for row, block in zip(rows, blocks, strict=True)
        for byte in range(4)
    ]
    zeros = ir.Constant(loaded.type, [0] * size)
    spread = b.shuffle_vector(loaded, zeros, ir.Constant(ir.VectorType(I32, 4 * LANES), chosen))
    power = b.lshr(b.bitcast(spread, INTS), _ints(1))
    least = _ints(_LEAST_POWER)
    power = b.select(b.icmp_unsigned("<", power, least), least, power)
    return [b.bitcast(power, VECTOR)]


def weights(builder: Any, address: Any, pairwise: bool, values: Sequence[float] = _VALUES) -> list[Any]:
    """What meets activations as they lie in their order, one vector after the other: bfloat16 pairs, or
    float32. address: of a vector of code words. values: of codes; others than those of MXFP4 count up by
    one."""
    b, words = builder, load_at(builder, address, INTS, 4)
    if pairwise:
        return [_pairs(b, b.lshr(words, _ints(4 * j)), values) for j in range(_WORD_PAIRS)]
    if BY_BYTES:
        return [half for pairs in _byte_pairs(b, words, values) for half in halves(b, pairs)]
    return [
        _floats(b, b.lshr(words, _ints(4 * j + 16 * second)) if j + second else words, values)
        for j in range(_WORD_PAIRS)
        for second in range(2)
    ]


def _pairs(builder: Any, codes: Any, values: Sequence[float]) -> Any:
    """bfloat16 of the codes in the lowest bits of both halves."""
    b, kind = builder, ir.VectorType(I16, 2 * LANES)
    table = ir.Constant(kind, [_bits(value) >> 16 for value in values] * 2)
    found = call_llvm(b, kind, "llvm.x86.avx512.permvar.hi.512", table, b.bitcast(codes, kind))
    return b.bitcast(found, INTS)


def _byte_pairs(builder: Any, words: Any, values: Sequence[float]) -> list[Any]:
    """bfloat16 of all codes, in the order that unpacking bytes leaves them in, see `place`."""
    b, kind = builder, BYTES
    signed = [_bits(value) >> 16 for value in values]
    lower, upper = (
        ir.Constant(kind, [number >> shift & 255 for number in signed] * (LANES // 4)) for shift in (0, 8)
    )
    of_byte = [b.bitcast(b.and_(some, _ints(0x0F0F0F0F)), kind) for some in (words, b.lshr(words, _ints(4)))]
    found = [
        [call_llvm(b, kind, "llvm.x86.avx2.pshuf.b", table, codes) for table in (lower, upper)]
        for codes in of_byte
    ]
    return [unpacked(b, low, high, first) for first in (0, 8) for low, high in found]


def _floats(builder: Any, codes: Any, values: Sequence[float]) -> Any:
    """float32 of the codes in the lowest bits."""
    b = builder
    if HAS_AVX512:
        table = ir.Constant(VECTOR, list(values))
        return call_llvm(b, VECTOR, "llvm.x86.avx512.permvar.sf.512", table, codes)
    if values is not _VALUES:
        return b.sitofp(b.add(b.and_(codes, _ints(15)), _ints(int(values[0]))), VECTOR)
    place = b.shl(b.and_(codes, _ints(7)), _ints(2))
    doubled = b.and_(b.lshr(_ints(_DOUBLED), place), _ints(15))
    half = ir.Constant(VECTOR, [0.5] * LANES)
    found = b.bitcast(b.fmul(b.sitofp(doubled, VECTOR), half), INTS)
    sign = b.shl(b.and_(codes, _ints(8)), _ints(28))
    return b.bitcast(b.or_(found, sign), VECTOR)


def order(pairwise: bool) -> tuple[tuple[int, int], ...]:
    """Of activations, see codings: eight words of a tile side by side, for each of a word's pairs of columns;
    of float32 a pair's first columns come before its second ones. Where codes are looked up by bytes: numbers
    as unpacking leaves them, for each half of the words, nibble of a byte and half of a pair."""
    if pairwise:
        return (0, 1), (3, 3), (1, 2)
    if not BY_BYTES:
        return (3, 3), (0, 1), (1, 2)
    return (0, 1), (3, 1), (5, 1), (2, 1), (1, 1), (4, 1)
