"""Dot products of a strip of 16 rows of a matrix in MXFP4 (kernels.mxfp4_tiles) with one, two or four tokens
at once, in one pass over the strip, from its first byte to its last: memory is fastest that way, also where
not all sums stay in registers.

Weights are not decoded to memory: a vector of code words is looked up as the processor can, products are
exact, and the sum of eight columns is multiplied by their scale, a power of two, before it is added to the
rest. A token's sum is the same whatever other tokens are with it.

Activations lie as vectors of code words want them, see `place`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from localmoe.kernels.cpu.atoms import prefetch
from localmoe.kernels.cpu.processor import HAS_AVX2, HAS_AVX512, HAS_BF16_DOTS, LANES
from localmoe.kernels.cpu.vector_loops import (
    F32,
    I8,
    I16,
    I32,
    LINE,
    VECTOR,
    const,
    load_at,
    loop,
    multiply_add,
    row_addresses,
    total,
    zeros,
)
from localmoe.kernels.mxfp4_tiles import TILE_COLUMNS, TILE_ROWS

_WORDS = 8  # of a row in a tile, of eight columns each
_WORD_PAIRS = 4
_ROW_BYTES, _TILE_BYTES = 4 * _WORDS, 4 * _WORDS * TILE_ROWS
_SCALE_BYTES = 4 * TILE_ROWS  # of two tiles
_TOGETHER = max(1, LANES // _WORDS)  # rows of a vector
_PARTS = max(1, _WORDS // LANES)  # vectors of a row
_AHEAD = 1024  # bytes fetched before they are used
# of a sign, two bits of exponent and one of mantissa (FP4 E2M1)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DOUBLED = 0xC8643210  # the same times two, four bits each
_LEAST_POWER = 0x00400000  # 2^-127, for which the exponent's bits alone say zero
_INTS = ir.VectorType(I32, LANES)


def _ints(numbers: Sequence[int] | int) -> Any:
    return ir.Constant(_INTS, [numbers] * LANES if isinstance(numbers, int) else list(numbers))


def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


class _Tile:
    """Writes the code of a strip's tiles. codes, scales: addresses of the first one's. tokens: addresses of
    rows of x."""

    def __init__(self, builder: Any, pairwise: bool, codes: Any, scales: Any, tokens: list[Any]) -> None:
        self.builder = builder
        self.pairwise = pairwise
        self.codes = codes
        self.scales = scales
        self.tokens = tokens

    def turn(self, tile: Any, sums: list[Any]) -> list[Any]:
        """Add a tile's products to the sums, one vector for _TOGETHER rows and a token."""
        b = self.builder
        at = b.add(self.codes, b.mul(tile, const(_TILE_BYTES)))
        for line in range(0, _TILE_BYTES, LINE):
            prefetch(b, b.add(at, const(_AHEAD + line)))
        half = b.and_(tile, const(1))  # of the columns that a word of scales is for
        scales = b.add(self.scales, b.mul(b.lshr(tile, const(1)), const(_SCALE_BYTES)))
        for vector in range(TILE_ROWS // _TOGETHER):
            row = vector * _TOGETHER
            words = self._spread(b.add(scales, const(4 * row)))
            for part in range(_PARTS):
                place = b.add(at, const(row * _ROW_BYTES + part * 4 * LANES))
                weights = self._weights(load_at(b, place, _INTS, 4))
                power = self._powers(words, half, part)
                for t, token in enumerate(self.tokens):
                    i = vector * len(self.tokens) + t
                    products = self._products(weights, token, tile, part)
                    sums[i] = multiply_add(b, products, power, sums[i])
        return sums

    def _spread(self, address: Any) -> Any:
        """The scale words of a vector's rows, each for all lanes of its row."""
        loaded = load_at(self.builder, address, ir.VectorType(I32, _TOGETHER), 4)
        rows = [min(lane // _WORDS, _TOGETHER - 1) for lane in range(LANES)]
        return self.builder.shuffle_vector(loaded, loaded, ir.Constant(ir.VectorType(I32, LANES), rows))

    def _powers(self, words: Any, half: Any, part: int) -> Any:
        """float32 of the scale that each lane's columns have."""
        b = self.builder
        shift = _ints([8 * ((part * LANES + lane) % _WORDS // 4) for lane in range(LANES)])
        behind = _splat(b, b.trunc(b.shl(half, const(4)), I32))
        exponent = b.and_(b.lshr(words, b.add(shift, behind)), _ints(255))
        power = b.shl(exponent, _ints(23))
        least = _ints(_LEAST_POWER)
        power = b.select(b.icmp_unsigned("<", power, least), least, power)
        return b.bitcast(power, VECTOR)

    def _weights(self, words: Any) -> list[Any]:
        """What `_products` multiplies: 16-bit pairs, or float32 of a pair's first and its second column."""
        b = self.builder
        if self.pairwise:
            return [self._pairs(b.lshr(words, _ints(4 * j))) for j in range(_WORD_PAIRS)]
        return [
            self._floats(b.lshr(words, _ints(4 * j + 16 * second)) if j + second else words)
            for j in range(_WORD_PAIRS)
            for second in range(2)
        ]

    def _pairs(self, codes: Any) -> Any:
        """bfloat16 of the codes in the lowest bits of both halves."""
        b, kind = self.builder, ir.VectorType(I16, 2 * LANES)
        signed = [*_MAGNITUDES, *(-value for value in _MAGNITUDES)]
        table = ir.Constant(kind, [_bits(value) >> 16 for value in signed] * 2)
        found = _call(b, kind, "llvm.x86.avx512.permvar.hi.512", table, b.bitcast(codes, kind))
        return b.bitcast(found, _INTS)

    def _floats(self, codes: Any) -> Any:
        """float32 of the codes in the lowest bits."""
        b = self.builder
        if HAS_AVX512:
            table = ir.Constant(VECTOR, [*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
            return _call(b, VECTOR, "llvm.x86.avx512.permvar.sf.512", table, codes)
        if HAS_AVX2:
            table = ir.Constant(VECTOR, list(_MAGNITUDES))
            found = b.bitcast(_call(b, VECTOR, "llvm.x86.avx2.permps", table, codes), _INTS)
        else:
            place = b.shl(b.and_(codes, _ints(7)), _ints(2))
            doubled = b.and_(b.lshr(_ints(_DOUBLED), place), _ints(15))
            half = ir.Constant(VECTOR, [0.5] * LANES)
            found = b.bitcast(b.fmul(b.sitofp(doubled, VECTOR), half), _INTS)
        sign = b.shl(b.and_(codes, _ints(8)), _ints(28))
        return b.bitcast(b.or_(found, sign), VECTOR)

    def _products(self, weights: list[Any], token: Any, tile: Any, part: int) -> Any:
        """Sums of eight columns each."""
        b = self.builder
        width = 2 if self.pairwise else 4
        at = b.add(token, b.mul(tile, const(TILE_COLUMNS * width)))
        products = None if not self.pairwise else ir.Constant(VECTOR, [0.0] * LANES)
        for step, weight in enumerate(weights):
            x = self._activations(b.add(at, const(4 * (step * _WORDS + part * LANES))))
            if self.pairwise:
                kind = ir.FunctionType(VECTOR, [_INTS, _INTS, VECTOR])
                code = "vdpbf16ps $2, $1, $0"
                products = b.asm(kind, code, "=v,v,v,0", [weight, x, products], False)
            elif products is None:
                products = b.fmul(weight, x)
            else:
                products = multiply_add(b, weight, x, products)
        return products

    def _activations(self, address: Any) -> Any:
        """Those of a row's words, for all rows of a vector."""
        b = self.builder
        number = I32 if self.pairwise else F32
        count = min(LANES, _WORDS)
        loaded = load_at(b, address, ir.VectorType(number, count), 4)
        if count == LANES:
            return loaded
        lanes = ir.Constant(_INTS, [lane % count for lane in range(LANES)])
        return b.shuffle_vector(loaded, loaded, lanes)


def _splat(builder: Any, number: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_INTS, ir.Undefined), number, ir.Constant(I32, 0))
    return builder.shuffle_vector(vector, vector, _ints(0))


def _call(builder: Any, result: Any, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _row_totals(builder: Any, vector: Any) -> list[Any]:
    """The sum of each row of a vector."""
    if _TOGETHER == 1:
        return [total(builder, vector)]
    parts = [
        ir.Constant(ir.VectorType(I32, _WORDS), list(range(first, first + _WORDS)))
        for first in range(0, LANES, _WORDS)
    ]
    return [total(builder, builder.shuffle_vector(vector, vector, part)) for part in parts]


def _make(tokens: int) -> Any:
    @intrinsic
    def tile(
        context: Any, x: Any, codes: Any, scales: Any, base: Any, pitch: Any, rows: Any, tiles: Any,
        out: Any, out_pitch: Any,
    ) -> Any:  # fmt: skip
        pairwise = x.dtype == types.uint16
        if pairwise and not HAS_BF16_DOTS:
            raise TypeError("this processor wants activations in float32")

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            codes, scales, base, pitch, rows, tiles, out, out_pitch = arguments[1:]
            inputs = row_addresses(builder, base, pitch, rows, tokens)
            made = _Tile(builder, pairwise, codes, scales, inputs)
            sums = loop(builder, const(0), tiles, 1, zeros(TILE_ROWS // _TOGETHER * tokens), made.turn)
            for i, vector in enumerate(sums):
                first, token = divmod(i, tokens)
                for j, number in enumerate(_row_totals(builder, vector)):
                    row = builder.mul(out_pitch, const(first * _TOGETHER + j))
                    cell = builder.add(builder.add(out, row), const(4 * token))
                    builder.store(number, builder.inttoptr(cell, F32.as_pointer()))
            return ir.Constant(I8, 0)

        return types.int8(x, *[types.int64] * 8), generate

    return tile


# tile(x, codes, scales, base, pitch, rows, tiles, out, out_pitch): out[r][t] = row r of the strip . token t.
# x: an array, for its dtype alone. codes, scales: addresses of the strip's. base, pitch: x's address and its
# bytes a row. rows: address of int32 rows of x. tiles: of 64 columns, the first ones. out, out_pitch: address
# of float32 (16, at least tokens) and its bytes a row.
mxfp4_dots_1, mxfp4_dots_2, mxfp4_dots_4 = _make(1), _make(2), _make(4)


@intrinsic
def place(context: Any, column: Any, x: Any) -> Any:
    """Where activation `column` lies in a row of `x`: eight words of a tile side by side, for each of the
    word's pairs of columns; where `x` has float32, a pair's first columns come before its second ones."""
    pairwise = x.dtype == types.uint16

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        b, c = builder, arguments[0]
        tile = b.and_(c, const(-TILE_COLUMNS))
        word = b.and_(b.lshr(c, const(3)), const(7))
        pair = b.shl(b.and_(b.lshr(c, const(1)), const(3)), const(4))
        second = b.and_(c, const(1))
        inside = b.add(b.shl(word, const(1)), second) if pairwise else b.add(b.shl(second, const(3)), word)
        return b.add(b.add(tile, pair), inside)

    return types.int64(types.int64, x), generate
