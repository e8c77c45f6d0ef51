"""Dot products of a strip of 16 rows of a matrix in a coding with scales (codings) with one, two or four
tokens at once, in one pass over the strip, from its first byte to its last: memory is fastest that way, also
where not all sums stay in registers.

Weights are not decoded to memory: a vector of codes is looked up as the processor can, products are exact,
and the sum of columns that share a scale, of those in a lane's words, is multiplied by it before it is added
to the rest. A token's sum is the same whatever other tokens are with it.

Activations lie as vectors of codes want them, see codings.place.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.cpu.atoms import prefetch
from localmoe.kernels.cpu.codings import SCALES_ROW, Coding, coding_of
from localmoe.kernels.cpu.processor import HAS_BF16_DOTS, LANES
from localmoe.kernels.cpu.strip_vectors import (
    INTS,
    activations,
    ahead_of,
    row_parts,
    rows_together,
    store_totals,
)
from localmoe.kernels.cpu.vector_loops import (
    F32,
    I8,
    LINE,
    const,
    load_at,
    loop,
    multiply_add,
    multiply_add_pairs,
    row_addresses,
    zeros,
)
from localmoe.kernels.fp8_tiles import TILE_COLUMNS, TILE_ROWS

_ONES = 0x3F803F80  # a pair of bfloat16


class _Tile:
    """Writes the code of a strip's tiles. codes, scales: addresses of the first one's; following: of both
    that are read after the last one's. tokens: addresses of rows of x."""

    def __init__(
        self, builder: Any, coding: Coding, pairwise: bool, codes: Any, scales: Any,
        following: tuple[Any, Any], tiles: Any, tokens: list[Any],
    ) -> None:  # fmt: skip
        self.builder = builder
        self.coding = coding
        self.pairwise = pairwise
        self.codes = codes
        self.scales = scales
        self.following = following
        self.tiles = tiles
        self.tokens = tokens
        self.together = rows_together(coding.words)

    def turn(self, tile: Any, sums: list[Any], count: int = 1) -> list[Any]:
        """Add products of so many tiles, of one or of two that share scales, to the sums: one vector for some
        rows together and a token."""
        lines, vectors = self._lines_ahead(tile, count), TILE_ROWS // self.together
        totals = self._totals(tile, count)
        # many at once wait for each other, and what is computed waits for them; but vectors share no
        # activations across a prefetch, by which four tokens lose more
        turns = vectors if self.coding.spreads and len(self.tokens) < 4 else 1
        for vector in range(vectors):
            for line in lines[vector * len(lines) // turns : (vector + 1) * len(lines) // turns]:
                prefetch(self.builder, line, near=self.coding.near)
            self._add(tile, count, vector, sums, totals)
        return sums

    def _lines_ahead(self, tile: Any, count: int) -> list[Any]:
        """Addresses of what is fetched while so many tiles are computed."""
        b, coding, (codes, scales) = self.builder, self.coding, self.following
        lines = [ahead_of(b, tile, self.tiles, coding.ahead, self.scales, scales, coding.scale_bytes)]
        for i in range(count):
            wanted = ahead_of(b, tile, self.tiles, coding.ahead + i, self.codes, codes, coding.tile_bytes)
            lines += [b.add(wanted, const(line)) for line in range(0, coding.tile_bytes, LINE)]
        return lines

    def _totals(self, first: Any, count: int) -> list[list[Any]]:
        """For each part of a row, of each token: sums of its activations in so many tiles, where weights are
        shifted."""
        b, coding, ones = self.builder, self.coding, ir.Constant(INTS, [_ONES] * LANES)
        if coding.shifts is None:
            return []
        found = [[zeros(1)[0] for _ in self.tokens] for _ in range(row_parts(coding.words))]
        for part, totals in enumerate(found):
            for i in range(count):
                for t, token in enumerate(self.tokens):
                    at = self._activations_at(token, b.add(first, const(i)))
                    for step in range(TILE_COLUMNS // coding.words // (2 if self.pairwise else 1)):
                        x = activations(b, at, step, part, self.pairwise, coding.words)
                        totals[t] = (
                            multiply_add_pairs(b, ones, x, totals[t])
                            if self.pairwise
                            else b.fadd(x, totals[t])
                        )
        return found

    def _activations_at(self, token: Any, tile: Any) -> Any:
        b = self.builder
        return b.add(token, b.mul(tile, const(TILE_COLUMNS * (2 if self.pairwise else 4))))

    def _add(self, first: Any, count: int, vector: int, sums: list[Any], totals: list[list[Any]]) -> None:
        """Products of the tiles' rows of a vector. totals: see _totals."""
        b, coding, row = self.builder, self.coding, vector * self.together
        which = b.urem(first, const(coding.scaled))  # of the tiles that scales are for
        scales = b.add(self.scales, b.mul(b.sub(first, which), const(coding.scale_bytes)))
        for part in range(row_parts(coding.words)):
            factors = coding.scales(b, b.add(scales, const(SCALES_ROW * row)), which, part)
            products: list[list[Any]] = [[None] * len(self.tokens) for _ in factors]
            for i in range(count):
                tile = b.add(first, const(i))
                at = b.add(self.codes, b.mul(tile, const(coding.tile_bytes)))
                place = b.add(at, const(row * coding.row_bytes + part * 4 * LANES))
                found = list(enumerate(coding.weights(b, place, self.pairwise)))
                size = len(found) // len(factors)
                for group, some in enumerate(products):
                    these = found[group * size : (group + 1) * size]
                    some[:] = [
                        self._products(these, token, tile, part, before)
                        for token, before in zip(self.tokens, some, strict=True)
                    ]
            for shift in (
                coding.shifts(b, b.add(scales, const(SCALES_ROW * row)), part) if coding.shifts else ()
            ):
                (some,) = products  # all of a row's vectors have one scale
                some[:] = [
                    multiply_add(b, shift, total, product)
                    for total, product in zip(totals[part], some, strict=True)
                ]
            for some, scale in zip(products, factors, strict=True):
                for i, product in enumerate(some, vector * len(self.tokens)):
                    sums[i] = multiply_add(b, product, scale, sums[i])

    def _products(self, weights: list[tuple[int, Any]], token: Any, tile: Any, part: int, before: Any) -> Any:
        """Sums of columns that share a scale. weights: with their numbers. before: those of a tile before, or
        None."""
        b, products = self.builder, before
        at = self._activations_at(token, tile)
        if self.pairwise and before is None:
            products = zeros(1)[0]
        for step, weight in weights:
            x = activations(b, at, step, part, self.pairwise, self.coding.words)
            if self.pairwise:
                products = multiply_add_pairs(b, weight, x, products)
            elif products is None:
                products = b.fmul(weight, x)
            else:
                products = multiply_add(b, weight, x, products)
        return products


def _row_factors(builder: Any, address: Any) -> list[tuple[Any]]:
    """What the sums of each row are multiplied by."""
    return [(load_at(builder, builder.add(address, const(4 * r)), F32, 4),) for r in range(TILE_ROWS)]


def _make(tokens: int) -> Any:
    @intrinsic
    def tile(
        context: Any, x: Any, coded: Any, codes: Any, scales: Any, next_codes: Any, next_scales: Any,
        factors: Any, base: Any, pitch: Any, rows: Any, tiles: Any, out: Any, out_pitch: Any,
    ) -> Any:  # fmt: skip
        pairwise, coding = x.dtype == types.uint16, coding_of(coded)
        if pairwise and not HAS_BF16_DOTS:
            raise TypeError("this processor wants activations in float32")
        together = rows_together(coding.words)

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            codes, scales, next_codes, next_scales, factors, *others = arguments[2:]
            base, pitch, rows, tiles, out, out_pitch = others
            inputs = row_addresses(builder, base, pitch, rows, tokens)
            following = next_codes, next_scales
            made = _Tile(builder, coding, pairwise, codes, scales, following, tiles, inputs)
            sums, done = zeros(TILE_ROWS // together * tokens), const(0)
            if pairwise and coding.shares:
                done = builder.and_(tiles, const(-2))
                sums = loop(builder, const(0), done, 2, sums, lambda tile, sums: made.turn(tile, sums, 2))
            sums = loop(builder, done, tiles, 1, sums, made.turn)
            of_rows = _row_factors(builder, factors) if coding.factors else ()
            store_totals(builder, sums, tokens, out, out_pitch, of_rows, together)
            return ir.Constant(I8, 0)

        return types.int8(x, coded, *[types.int64] * 11), generate

    return tile


# tile(x, coded, codes, scales, next_codes, next_scales, factors, base, pitch, rows, tiles, out, out_pitch):
# out[r][t] = row r of the strip . token t. x: an array, for its dtype alone. coded: see codings. codes,
# scales, next_codes, next_scales: addresses of the strip's, and of what is read next. factors: address of the
# strip's, where the coding has such. base, pitch: x's
# address and its bytes a row. rows: address of int32 rows of x. tiles: of 64 columns, the first ones. out,
# out_pitch: address of float32 (16, at least tokens) and its bytes a row.
coded_dots_1, coded_dots_2, coded_dots_4 = _make(1), _make(2), _make(4)
