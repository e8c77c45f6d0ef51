"""Dot products of a strip of 16 rows of a matrix in BF12 (kernels.bf12_tiles) with one, two, four or MANY
tokens at once. One or two meet it in one pass, from its first byte to its last: memory is fastest that way.
For four or more it is read GROUP vectors at a time, so that decoding is shared by more of them and all sums
stay in registers; it lies in a cache by then, as it was fetched while the strip before was computed.

Weights are not decoded to memory, nor multiplied by their rows' scales: sums are. A weight's bytes are a
bfloat16 near the smallest there are, so activations are kept RAISED, for products that are far from both ends
of float32, and lie as vectors of weights want them, see bf12_vectors.place. Products are exact, sums float32;
a token's sum is the same whatever other tokens are with it. Strays are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.bf12_tiles import TILE_COLUMNS, TILE_ROWS, UP
from localmoe.kernels.cpu.atoms import prefetch
from localmoe.kernels.cpu.bf12_vectors import RAISED, TILE_BYTES, weights
from localmoe.kernels.cpu.processor import HAS_BF16_DOTS, LANES, MANY_REGISTERS
from localmoe.kernels.cpu.strip_vectors import (
    PARTS,
    TOGETHER,
    WORDS,
    activations,
    ahead_of,
    store_totals,
)
from localmoe.kernels.cpu.vector_loops import (
    F32,
    I8,
    LINE,
    const,
    keep_order,
    load_at,
    loop,
    multiply_add,
    multiply_add_pairs,
    row_addresses,
    zeros,
)

_ROW_BYTES = 4 * WORDS  # of a plane
_VECTORS, _LINES = TILE_ROWS // TOGETHER, TILE_BYTES // LINE
GROUP, MANY = 2, 8 if MANY_REGISTERS else 4  # measured by benchmarks/cpu_experts.py
_GROUPS = _VECTORS // GROUP
_AHEAD = 4  # tiles fetched before they are used


class _Tile:
    """Writes the code of a strip's tiles. codes, following: addresses of the first one's, and of what is read
    after the last one's. tokens: addresses of rows of x."""

    def __init__(
        self, builder: Any, pairwise: bool, codes: Any, following: Any, tiles: Any, tokens: list[Any]
    ) -> None:
        self.builder = builder
        self.pairwise = pairwise
        self.codes = codes
        self.following = following
        self.tiles = tiles
        self.tokens = tokens

    def turn(self, tile: Any, sums: list[Any]) -> list[Any]:
        """Add a tile's products to the sums, one vector for TOGETHER rows and a token."""
        b = self.builder
        at, inputs = b.add(self.codes, b.mul(tile, const(TILE_BYTES))), self._inputs(tile)
        wanted = ahead_of(b, tile, self.tiles, _AHEAD, self.codes, self.following, TILE_BYTES)
        for vector in range(_VECTORS):
            keep_order(b)  # where registers are few, rows that are begun together lose theirs to each other
            # a few at a time: many at once wait for each other, and what is computed waits for them; into the
            # second cache, which has more of them under way than the first one
            for line in range(vector * _LINES // _VECTORS, (vector + 1) * _LINES // _VECTORS):
                prefetch(b, b.add(wanted, const(line * LINE)), near=False)
            self._add(vector, at, inputs, sums)
        return sums

    def turn_of_group(self, group: Any, row: Any, tile: Any, sums: list[Any]) -> list[Any]:
        """The same of a group's vectors, from its first row on; a part of what follows is fetched."""
        b = self.builder
        begin, inputs = b.mul(tile, const(TILE_BYTES)), self._inputs(tile)
        wanted = b.add(b.add(self.following, begin), b.mul(group, const(_LINES // _GROUPS * LINE)))
        for line in range(_LINES // _GROUPS):
            prefetch(b, b.add(wanted, const(line * LINE)), near=False)
        at = b.add(b.add(self.codes, begin), b.mul(row, const(_ROW_BYTES)))
        for vector in range(GROUP):
            self._add(vector, at, inputs, sums)
        return sums

    def _inputs(self, tile: Any) -> list[Any]:
        """Addresses of each token's activations for a tile."""
        b, width = self.builder, TILE_COLUMNS * (2 if self.pairwise else 4)
        return [b.add(token, b.mul(tile, const(width))) for token in self.tokens]

    def _add(self, vector: int, at: Any, inputs: list[Any], sums: list[Any]) -> None:
        """Products of a vector's rows, `vector` vectors behind `at`."""
        b, add = self.builder, multiply_add_pairs if self.pairwise else multiply_add
        for part in range(PARTS):
            place = b.add(at, const(vector * TOGETHER * _ROW_BYTES + part * 4 * LANES))
            found = weights(b, place, self.pairwise)
            for t, token in enumerate(inputs):
                i = vector * len(inputs) + t
                for step, weight in enumerate(found):
                    x = activations(b, token, step, part, self.pairwise)
                    sums[i] = add(b, weight, x, sums[i])


def sum_factors(builder: Any, scales: Any, rows: int) -> list[tuple[Any, Any]]:
    """What the sums of each row are multiplied by; first what makes them moderate. scales: address."""
    rest = ir.Constant(F32, UP / RAISED)
    return [(rest, load_at(builder, builder.add(scales, const(4 * r)), F32, 4)) for r in range(rows)]


def _make(tokens: int, *, grouped: bool = False) -> Any:
    @intrinsic
    def tile(
        context: Any, x: Any, codes: Any, scales: Any, following: Any, base: Any, pitch: Any, rows: Any,
        tiles: Any, out: Any, out_pitch: Any,
    ) -> Any:  # fmt: skip
        pairwise = x.dtype == types.uint16
        if pairwise and not HAS_BF16_DOTS:
            raise TypeError("this processor wants activations in float32")

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            codes, scales, following, base, pitch, rows, tiles, out, out_pitch = arguments[1:]
            inputs = row_addresses(builder, base, pitch, rows, tokens)
            made = _Tile(builder, pairwise, codes, following, tiles, inputs)

            def dots_of(vectors: int, row: Any, turn: Callable[[Any, list[Any]], list[Any]]) -> None:
                sums = loop(builder, const(0), tiles, 1, zeros(vectors * tokens), turn)
                factors = sum_factors(
                    builder, builder.add(scales, builder.mul(row, const(4))), vectors * TOGETHER
                )
                into = builder.add(out, builder.mul(out_pitch, row))
                store_totals(builder, sums, tokens, into, out_pitch, factors)

            def one_group(group: Any, _: list[Any]) -> list[Any]:
                row = builder.mul(group, const(GROUP * TOGETHER))
                dots_of(GROUP, row, lambda tile, sums: made.turn_of_group(group, row, tile, sums))
                return []

            if grouped:
                loop(builder, const(0), const(_GROUPS), 1, [], one_group)
            else:
                dots_of(_VECTORS, const(0), made.turn)
            return ir.Constant(I8, 0)

        return types.int8(x, *[types.int64] * 9), generate

    return tile


# tile(x, codes, scales, following, base, pitch, rows, tiles, out, out_pitch): out[r][t] = row r of the strip
# . token t. x: an array, for its dtype alone. codes, scales, following: addresses of the strip's, and of what
# is read next. base, pitch: x's address and its bytes a row. rows: address of int32 rows of x. tiles: of 64
# columns, the first ones. out, out_pitch: address of float32 (16, at least tokens) and its bytes a row.
bf12_dots_1, bf12_dots_2, bf12_dots_4 = _make(1), _make(2), _make(4, grouped=True)
bf12_dots_many = _make(MANY, grouped=True)
