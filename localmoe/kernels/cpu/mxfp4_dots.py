"""Dot products of a strip of 16 rows of a matrix in MXFP4 (kernels.mxfp4_tiles) with one, two or four tokens
at once, in one pass over the strip, from its first byte to its last: memory is fastest that way, also where
not all sums stay in registers.

Weights are not decoded to memory: a vector of code words is looked up as the processor can, products are
exact, and the sum of eight columns is multiplied by their scale, a power of two, before it is added to the
rest. A token's sum is the same whatever other tokens are with it.

Activations lie as vectors of code words want them, see `place`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.cpu.atoms import prefetch
from localmoe.kernels.cpu.mxfp4_vectors import powers, weights
from localmoe.kernels.cpu.processor import FETCHES_FAR, HAS_BF16_DOTS, LANES
from localmoe.kernels.cpu.strip_vectors import (
    INTS,
    PARTS,
    TOGETHER,
    WORDS,
    activations,
    ahead_of,
    store_totals,
)
from localmoe.kernels.cpu.vector_loops import (
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
from localmoe.kernels.mxfp4_tiles import TILE_COLUMNS, TILE_ROWS

_ROW_BYTES, _TILE_BYTES = 4 * WORDS, 4 * WORDS * TILE_ROWS
_SCALE_BYTES = 4 * TILE_ROWS  # of two tiles
_AHEAD = 12 if FETCHES_FAR else 2  # tiles fetched before they are used, an even number


class _Tile:
    """Writes the code of a strip's tiles. codes, scales: addresses of the first one's; following: of both
    that are read after the last one's. tokens: addresses of rows of x."""

    def __init__(
        self, builder: Any, pairwise: bool, codes: Any, scales: Any, following: tuple[Any, Any], tiles: Any,
        tokens: list[Any],
    ) -> None:  # fmt: skip
        self.builder = builder
        self.pairwise = pairwise
        self.codes = codes
        self.scales = scales
        self.following = following
        self.tiles = tiles
        self.tokens = tokens

    def turn(self, tile: Any, sums: list[Any]) -> list[Any]:
        """Add a tile's products to the sums, one vector for TOGETHER rows and a token."""
        b = self.builder
        at = b.add(self.codes, b.mul(tile, const(_TILE_BYTES)))
        self._fetch_ahead(tile)
        half = b.and_(tile, const(1))  # of the columns that a word of scales is for
        scales = b.add(self.scales, b.mul(b.lshr(tile, const(1)), const(_SCALE_BYTES)))
        for vector in range(TILE_ROWS // TOGETHER):
            row = vector * TOGETHER
            for part in range(PARTS):
                place = b.add(at, const(row * _ROW_BYTES + part * 4 * LANES))
                found = weights(b, load_at(b, place, INTS, 4), self.pairwise)
                power = powers(b, b.add(scales, const(4 * row)), half, part)
                for t, token in enumerate(self.tokens):
                    i = vector * len(self.tokens) + t
                    products = self._products(found, token, tile, part)
                    sums[i] = multiply_add(b, products, power, sums[i])
        return sums

    def _fetch_ahead(self, tile: Any) -> None:
        b, (codes, scales), near = self.builder, self.following, not FETCHES_FAR
        wanted = ahead_of(b, tile, self.tiles, _AHEAD, self.codes, codes, _TILE_BYTES)
        for line in range(0, _TILE_BYTES, LINE):
            prefetch(b, b.add(wanted, const(line)), near=near)
        wanted = ahead_of(b, tile, self.tiles, _AHEAD, self.scales, scales, _SCALE_BYTES // 2)
        prefetch(b, wanted, near=near)

    def _products(self, weights: list[Any], token: Any, tile: Any, part: int) -> Any:
        """Sums of eight columns each."""
        b = self.builder
        width = 2 if self.pairwise else 4
        at = b.add(token, b.mul(tile, const(TILE_COLUMNS * width)))
        products = zeros(1)[0] if self.pairwise else None
        for step, weight in enumerate(weights):
            x = activations(b, at, step, part, self.pairwise)
            if self.pairwise:
                products = multiply_add_pairs(b, weight, x, products)
            elif products is None:
                products = b.fmul(weight, x)
            else:
                products = multiply_add(b, weight, x, products)
        return products


def _make(tokens: int) -> Any:
    @intrinsic
    def tile(
        context: Any, x: Any, codes: Any, scales: Any, next_codes: Any, next_scales: Any, base: Any,
        pitch: Any, rows: Any, tiles: Any, out: Any, out_pitch: Any,
    ) -> Any:  # fmt: skip
        pairwise = x.dtype == types.uint16
        if pairwise and not HAS_BF16_DOTS:
            raise TypeError("this processor wants activations in float32")

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            codes, scales, next_codes, next_scales, base, pitch, rows, tiles, out, out_pitch = arguments[1:]
            inputs = row_addresses(builder, base, pitch, rows, tokens)
            following = next_codes, next_scales
            made = _Tile(builder, pairwise, codes, scales, following, tiles, inputs)
            sums = loop(builder, const(0), tiles, 1, zeros(TILE_ROWS // TOGETHER * tokens), made.turn)
            store_totals(builder, sums, tokens, out, out_pitch)
            return ir.Constant(I8, 0)

        return types.int8(x, *[types.int64] * 10), generate

    return tile


# tile(x, codes, scales, next_codes, next_scales, base, pitch, rows, tiles, out, out_pitch): out[r][t] = row r
# of the strip . token t. x: an array, for its dtype alone. codes, scales, next_codes, next_scales: addresses
# of the strip's, and of what is read next. base, pitch: x's address and its bytes a row. rows: address of
# int32 rows of x. tiles: of 64 columns, the first ones. out, out_pitch: address of float32 (16, at least
# tokens) and its bytes a row.
mxfp4_dots_1, mxfp4_dots_2, mxfp4_dots_4 = _make(1), _make(2), _make(4)
