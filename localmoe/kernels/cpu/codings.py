"""The codings whose scales are those of some columns of a row: which vector code belongs to each, and in
which order activations meet it. Which one it is, compiled code knows by the type of a word, `coded`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from localmoe.kernels import fp8_tiles
from localmoe.kernels.cpu import fp8_vectors, int4_vectors, mxfp4_vectors, nvfp4_vectors
from localmoe.kernels.cpu.processor import FETCHES_FAR
from localmoe.kernels.cpu.strip_vectors import WORDS, bits_of
from localmoe.kernels.cpu.vector_loops import const
from localmoe.kernels.fp8_tiles import TILE_COLUMNS, TILE_ROWS
from localmoe.kernels.weight_forms import WeightForm

SCALES_ROW = 4  # bytes of scales that a row has for one or two tiles
# the word that stands for each
CODED: dict[WeightForm, np.generic] = {
    WeightForm.MXFP4: np.uint16(0), WeightForm.FP8: np.uint8(0), WeightForm.NVFP4: np.uint32(0),
    WeightForm.INT4: np.int8(0), WeightForm.INT4_32: np.int16(0),
}  # fmt: skip
assert fp8_tiles.SCALE_COLUMNS == 2 * TILE_COLUMNS


@dataclass(frozen=True, slots=True)
class Coding:
    """How weights are coded, in tiles of 16 rows of 64 columns.

    Attributes:
        words: of 32 bits, of a row in a tile.
        weights: (builder, address of a vector of codes, pairwise): vectors that meet activations.
        scales: (builder, address of the first row's, which of two tiles, part of the row): vectors, each for
            as many of the weights' vectors, in their order.
        order: pairwise or not; of an activation's column the bits (first, count) that say where it lies in a
            tile's, from the lowest on.
        shares: a row has one scale for two tiles. They are taken together where products are those of pairs;
            others gain nothing by it.
        scaled: tiles that SCALES_ROW bytes are for; or `spans` times as many for one, those of all rows one
            after the other. shifts: (builder, address of the first row's, part of the row): as `scales`, what
            is added to each weight. factors: behind a strip's scales there is a float32 for
            each row, by which its sums are multiplied.
        ahead: tiles fetched before they are used, an even number. near: into the first cache. spreads: a few
            lines with each vector, instead of all at once (measured by benchmarks/cpu_experts.py).
    """

    words: int
    weights: Callable[[Any, Any, bool], list[Any]]
    scales: Callable[[Any, Any, Any, int], list[Any]]
    order: Callable[[bool], tuple[tuple[int, int], ...]]
    shares: bool
    ahead: int
    near: bool
    spreads: bool
    scaled: int = 2
    factors: bool = False
    spans: int = 1
    shifts: Callable[[Any, Any, int], list[Any]] | None = None

    @property
    def bits(self) -> int:
        """Of a weight's code."""
        return 32 * self.words // TILE_COLUMNS

    @property
    def row_bytes(self) -> int:
        """Of a row in a tile."""
        return 4 * self.words

    @property
    def tile_bytes(self) -> int:
        """Of a tile."""
        return self.row_bytes * TILE_ROWS

    @property
    def scale_bytes(self) -> int:
        """Of a tile's scales, where two tiles share them half of these."""
        return self.spans * SCALES_ROW * TILE_ROWS // self.scaled


MXFP4 = Coding(
    WORDS, mxfp4_vectors.weights, mxfp4_vectors.powers, mxfp4_vectors.order, shares=False,
    ahead=12 if FETCHES_FAR else 2, near=not FETCHES_FAR, spreads=False,
)  # fmt: skip
NVFP4 = replace(MXFP4, scales=nvfp4_vectors.scales, scaled=1, factors=True)
FP8 = Coding(
    fp8_vectors.WORDS, fp8_vectors.weights, fp8_vectors.scales, fp8_vectors.order, shares=True, ahead=6,
    near=False, spreads=True,
)  # fmt: skip


INT4 = replace(
    MXFP4, weights=int4_vectors.weights, scales=int4_vectors.scales_by(int4_vectors.wide),
    shifts=int4_vectors.shifts_by(int4_vectors.wide),
)  # fmt: skip
INT4_32 = replace(
    MXFP4, weights=int4_vectors.weights, scales=int4_vectors.scales_by(int4_vectors.narrow),
    shifts=int4_vectors.shifts_by(int4_vectors.narrow), scaled=1, spans=2,
)  # fmt: skip
_CODINGS = {
    types.uint16: MXFP4, types.uint8: FP8, types.uint32: NVFP4, types.int8: INT4, types.int16: INT4_32,
}  # fmt: skip


def coding_of(coded: Any) -> Coding:
    """coded: the word's type, as numba has it."""
    return _CODINGS[coded]


@intrinsic
def code_bits(context: Any, coded: Any) -> Any:
    """Of a weight's code."""
    return types.int64(coded), lambda _, __, ___, ____: const(coding_of(coded).bits)


@intrinsic
def scale_span(context: Any, coded: Any) -> Any:
    """Columns that SCALES_ROW bytes of a row are for."""

    def generate(_: Any, __: Any, ___: Any, ____: Any) -> Any:
        coding = coding_of(coded)
        return const(coding.scaled * TILE_COLUMNS // coding.spans)

    return types.int64(coded), generate


@intrinsic
def factor_bytes(context: Any, coded: Any) -> Any:
    """Of a row's factor, behind the scales of its strip."""
    return types.int64(coded), lambda _, __, ___, ____: const(4 * coding_of(coded).factors)


@intrinsic
def place(context: Any, column: Any, x: Any, coded: Any) -> Any:
    """Where activation `column` lies in a row of `x`."""
    order = coding_of(coded).order(x.dtype == types.uint16)

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        inside = bits_of(builder, arguments[0], *order)
        return builder.or_(builder.and_(arguments[0], const(-TILE_COLUMNS)), inside)

    return types.int64(types.int64, x, coded), generate
