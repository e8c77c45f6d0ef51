"""Dot products of four rows of 16-bit or float32 weights with one, two or four tokens at once, in one pass
over the weights that also fetches the rows to come.

A token's sum is the same whatever other tokens are with it: it runs over k in the same vectors and ends in
the same order. Where the processor multiplies bfloat16 itself, activations come as 16-bit words too.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.cpu.atoms import as_float, prefetch
from localmoe.kernels.cpu.processor import FETCHES_FAR, HAS_BF16_DOTS, LANES, MANY_REGISTERS
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
    multiply_add_pairs,
    row_addresses,
    total,
    widened,
    zeros,
)

ROWS = 4  # of weights: two of each of two streams
MOST_TOKENS = 4 if MANY_REGISTERS else 2  # sums of all rows and tokens stay in registers
STEP = LINE // 2  # weights of a row in one turn of the loop: a line of 16-bit ones
_AHEAD = 2048 if FETCHES_FAR else 1024  # bytes of a row fetched before they are used, while memory answers


class _Tile:
    """Writes the code of one tile. streams: addresses of ROWS rows. tokens: addresses of rows of x."""

    def __init__(self, builder: Any, kind: Any, pairwise: bool, streams: list[Any], tokens: list[Any]):
        """kind: numba's type of a weight's word, see atoms.value."""
        self.builder = builder
        self.is_bfloat = kind == types.uint16
        self.is_wide = kind == types.float32
        self.shift = const(2 if self.is_wide else 1)  # of words to bytes
        self.pairwise = pairwise
        self.streams = streams
        self.tokens = tokens

    def turn(self, k: Any, sums: list[Any], fetched: Any) -> list[Any]:
        """Add STEP products to every sum; `fetched` bytes further on, the rows are asked for."""
        b = self.builder
        at = b.add(b.shl(k, self.shift), fetched)
        for row in self.streams:
            for line in range(2 if self.is_wide else 1):
                prefetch(b, b.add(b.add(row, at), const(LINE * line)), near=not FETCHES_FAR)
        for part in range(1 if self.pairwise else STEP // LANES):
            here = b.add(k, const(part * LANES))
            weights = [self._weights(b.add(row, b.shl(here, self.shift))) for row in self.streams]
            for t, token in enumerate(self.tokens):
                x = self._activations(token, here)
                for r, weight in enumerate(weights):
                    place = r * len(self.tokens) + t
                    sums[place] = self._multiply_add(weight, x, sums[place])
        return sums

    def _weights(self, address: Any) -> Any:
        if self.pairwise:
            return load_at(self.builder, address, ir.VectorType(I32, LANES), 2)
        if self.is_wide:
            return load_at(self.builder, address, VECTOR, 4)
        words = load_at(self.builder, address, ir.VectorType(I16, LANES), 2)
        return widened(self.builder, words, self.is_bfloat)

    def _activations(self, token: Any, k: Any) -> Any:
        b = self.builder
        if self.pairwise:
            return load_at(b, b.add(token, b.shl(k, const(1))), ir.VectorType(I32, LANES), 2)
        return load_at(b, b.add(token, b.shl(k, const(2))), VECTOR, 4)

    def _multiply_add(self, weight: Any, x: Any, sums: Any) -> Any:
        add = multiply_add_pairs if self.pairwise else multiply_add
        return add(self.builder, weight, x, sums)

    def rest(self, k: Any, sums: list[Any]) -> list[Any]:
        """Add one product to every sum, which is a number here."""
        b = self.builder
        weights = [self._number(b.add(row, b.shl(k, self.shift)), self.is_wide) for row in self.streams]
        for t, token in enumerate(self.tokens):
            at = b.shl(k, const(1 if self.pairwise else 2))
            x = self._number(b.add(token, at), not self.pairwise)
            for r, weight in enumerate(weights):
                place = r * len(self.tokens) + t
                sums[place] = multiply_add(b, weight, x, sums[place])
        return sums

    def _number(self, address: Any, is_wide: bool) -> Any:
        if is_wide:
            return load_at(self.builder, address, F32, 4)
        return as_float(self.builder, load_at(self.builder, address, I16, 2), self.is_bfloat)


def _make(tokens: int) -> Any:
    @intrinsic
    def tile(
        context: Any, weights: Any, x: Any, a: Any, b: Any, step: Any, ahead: Any, base: Any, pitch: Any,
        rows: Any, length: Any, out: Any, out_pitch: Any,
    ) -> Any:  # fmt: skip
        kind, pairwise = weights.dtype, x.dtype == types.uint16
        if pairwise and not (kind == types.uint16 and HAS_BF16_DOTS):
            raise TypeError("this processor wants activations in float32")

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            a, b, step, ahead, base, pitch, rows, length, out, out_pitch = arguments[2:]
            streams = [a, builder.add(a, step), b, builder.add(b, step)]
            inputs = row_addresses(builder, base, pitch, rows, tokens)
            made = _Tile(builder, kind, pairwise, streams, inputs)
            whole = builder.and_(length, const(-STEP))
            # from there on what is ahead is the next rows
            near = builder.sub(whole, builder.ashr(const(_AHEAD), made.shift))
            near = builder.select(builder.icmp_signed(">", near, const(0)), near, const(0))
            sums = zeros(ROWS * tokens)
            sums = loop(builder, const(0), near, STEP, sums, lambda k, s: made.turn(k, s, const(_AHEAD)))
            jump = builder.sub(ahead, builder.shl(near, made.shift))
            sums = loop(builder, near, whole, STEP, sums, lambda k, s: made.turn(k, s, jump))
            numbers = [total(builder, vector) for vector in sums]
            numbers = loop(builder, whole, length, 1, numbers, made.rest)
            for place, number in enumerate(numbers):
                row, token = divmod(place, tokens)
                cell = builder.add(builder.add(out, builder.mul(out_pitch, const(row))), const(4 * token))
                builder.store(number, builder.inttoptr(cell, F32.as_pointer()))
            return ir.Constant(I8, 0)

        return types.int8(weights, x, *[types.int64] * 10), generate

    return tile


# tile(weights, x, a, b, step, ahead, base, pitch, rows, length, out, out_pitch): out[r][t] = row r . token t.
# weights, x: arrays, for their dtypes alone. a, b: addresses of two rows, whose partners lie `step` bytes on
# (0: a row is its own partner). ahead: bytes from these rows to the next ones; 0: there are none. base,
# pitch: x's address and bytes a row. rows: address of int32 rows of x. out, out_pitch: address of float32
# (ROWS, at least tokens) and its bytes a row.
dots_1, dots_2, dots_4 = _make(1), _make(2), _make(4)
