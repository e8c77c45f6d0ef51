"""Layout of one expert's record: [gate_up | down] in one contiguous piece, as 16- or 32-bit weights, as they
are published in MXFP4, NVFP4, FP8 or INT4, or as bfloat16 in twelve bits. Decides neither where records lie
nor when they move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from localmoe.kernels import bf12_tiles, fp8_tiles, int4_tiles, nvfp4_tiles
from localmoe.kernels.bf12_tiles import Bf12Matrix
from localmoe.kernels.fp8_tiles import Fp8Matrix
from localmoe.kernels.int4_tiles import SPANS, Int4Matrix
from localmoe.kernels.mxfp4_tiles import TILE_COLUMNS, Mxfp4Matrix, can_be_tiled, code_bytes, scale_bytes
from localmoe.kernels.nvfp4_tiles import Nvfp4Matrix
from localmoe.kernels.weight_forms import WeightForm

PAGE_BYTES = 4096
PackedMatrix: TypeAlias = Bf12Matrix | Fp8Matrix | Nvfp4Matrix | Int4Matrix


def record_stride(layout: RecordLayout, dtype: torch.dtype) -> int:
    """Bytes from one record to the next: whole pages. dtype: of weights in plain form."""
    return -(-layout.num_bytes(dtype) // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Shapes of the two matrices of an expert, in the orientation of the model's module.

    Attributes:
        gate_up_shape: (2I, H), or (H, 2I) when transposed; of experts without a gate I instead of 2I, which
            are up's.
        down_shape: (H, I), or (I, H) when transposed.
        form: in MXFP4 the record is [codes of gate_up | codes of down | scales of gate_up | scales of down],
            bytes; its matrices are (2I, H) and (H, I), whatever the module's are. In BF12 it is [codes of
            gate | codes of up | codes of down | what is beside gate's | beside up's | beside down's], bytes,
            of matrices (I, H), (I, H) and (H, I); without a gate all of gate is left out. In FP8, NVFP4
            and INT4 it is the same with scales beside.
    """

    gate_up_shape: tuple[int, int]
    down_shape: tuple[int, int]
    transposed: bool
    form: WeightForm = WeightForm.PLAIN

    @property
    def mxfp4(self) -> bool:
        """Whether it is in MXFP4."""
        return self.form is WeightForm.MXFP4

    @property
    def bf12(self) -> bool:
        """Whether it is in BF12."""
        return self.form is WeightForm.BF12

    @property
    def fp8(self) -> bool:
        """Whether it is in FP8."""
        return self.form is WeightForm.FP8

    @property
    def nvfp4(self) -> bool:
        """Whether it is in NVFP4."""
        return self.form is WeightForm.NVFP4

    @property
    def span(self) -> int:
        """Columns that share a scale in INT4; 0: it is not in INT4."""
        return SPANS.get(self.form, 0)

    @property
    def packed(self) -> bool:
        """Whether its matrices are packed one by one: in BF12, FP8, NVFP4 or INT4."""
        return self.bf12 or self.fp8 or self.nvfp4 or self.span > 0

    @property
    def gated(self) -> bool:
        """Whether there is a gate beside up."""
        return self.gate_up_shape[1 if self.transposed else 0] == 2 * self.inner

    @property
    def hidden(self) -> int:
        """H."""
        return self.down_shape[1 if self.transposed else 0]

    @property
    def inner(self) -> int:
        """I."""
        return self.down_shape[0 if self.transposed else 1]

    @property
    def gate_up_elements(self) -> int:
        """Weights in gate_up."""
        return math.prod(self.gate_up_shape)

    @property
    def elements(self) -> int:
        """Weights in the record."""
        return self.gate_up_elements + math.prod(self.down_shape)

    @property
    def rows(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(2I, H), without a gate (I, H), and (H, I)."""
        return ((2 if self.gated else 1) * self.inner, self.hidden), (self.hidden, self.inner)

    @property
    def fits_mxfp4(self) -> bool:
        """Whether such records can be in MXFP4: gate's and up's rows are whole strips of tiles both, and a
        row is two tiles at least, as what the kernel sums takes two turns (gpu.routed_experts). No kernel
        reads such records of experts without a gate."""
        tiled = self.gated and can_be_tiled(self.inner, self.hidden) and can_be_tiled(self.hidden, self.inner)
        return tiled and min(self.inner, self.hidden) >= 2 * TILE_COLUMNS

    @property
    def mxfp4_bytes(self) -> int:
        """Bytes of a record in MXFP4."""
        return sum(code_bytes(*shape) + scale_bytes(*shape) for shape in self.rows)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(I, H), (I, H) and (H, I): gate, if there is one, up and down."""
        up = (self.inner, self.hidden)
        return (*((up, up) if self.gated else (up,)), (self.hidden, self.inner))

    @property
    def fits_bf12(self) -> bool:
        """Whether such records can be in BF12: of matrices (out, in), gate's rows before up's."""
        return not self.transposed and all(bf12_tiles.can_be_tiled(*shape) for shape in self.matrices)

    @property
    def bf12_bytes(self) -> int:
        """Bytes of a record in BF12: whole pages, so that in an arena of slots, too, tiles are whole lines of
        what a GPU reads at once."""
        used = sum(bf12_tiles.num_bytes(*shape) for shape in self.matrices)
        return -(-used // PAGE_BYTES) * PAGE_BYTES

    @property
    def fits_codes(self) -> bool:
        """Whether such records can be in FP8, NVFP4 or INT4: of matrices (out, in), gate's rows before up's,
        and with rows of two tiles at least, as in MXFP4."""
        tiled = not self.transposed and all(fp8_tiles.can_be_tiled(*shape) for shape in self.matrices)
        return tiled and min(self.inner, self.hidden) >= 2 * fp8_tiles.TILE_COLUMNS

    @property
    def coded_bytes(self) -> int:
        """Bytes of a record in FP8, NVFP4 or INT4, whichever it is in: whole pages, as in BF12."""
        used = sum(code + side for code, side in zip(*self.coded_parts(), strict=True))
        return -(-used // PAGE_BYTES) * PAGE_BYTES

    def coded_parts(self) -> tuple[list[int], list[int]]:
        """Bytes of each matrix's codes, and of what is beside them."""
        shapes = self.matrices
        if self.fp8:
            return [fp8_tiles.code_bytes(*one) for one in shapes], [
                fp8_tiles.scale_bytes(*one) for one in shapes
            ]
        codes = [nvfp4_tiles.code_bytes(*one) for one in shapes]
        if self.nvfp4:
            return codes, [nvfp4_tiles.side_bytes(*one) for one in shapes]
        return codes, [int4_tiles.side_bytes(*one, self.span) for one in shapes]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights, without padding. dtype: of weights in plain form."""
        if self.packed:
            return self.bf12_bytes if self.bf12 else self.coded_bytes
        return self.mxfp4_bytes if self.mxfp4 else self.elements * dtype.itemsize

    def word(self, dtype: torch.dtype) -> torch.dtype:
        """What a record is made of: weights of `dtype`, or bytes."""
        return dtype if self.form is WeightForm.PLAIN else torch.uint8

    def views(self, record: Tensor) -> tuple[Tensor, Tensor]:
        """(gate_up, down) as views of a flat record of `elements` weights."""
        assert self.form is WeightForm.PLAIN, "its weights are codes"
        split = self.gate_up_elements
        return record[:split].view(self.gate_up_shape), record[split : self.elements].view(self.down_shape)

    def mxfp4_views(self, record: Tensor) -> tuple[Mxfp4Matrix, Mxfp4Matrix]:
        """(gate_up, down) in a record of bytes."""
        gate_up, down = self.rows
        sizes = [code_bytes(*gate_up), code_bytes(*down), scale_bytes(*gate_up), scale_bytes(*down)]
        codes, more_codes, scales, more_scales = record[: sum(sizes)].split(sizes)
        return Mxfp4Matrix.at(codes, scales, *gate_up), Mxfp4Matrix.at(more_codes, more_scales, *down)

    def packed_views(self, record: Tensor) -> tuple[PackedMatrix, ...]:
        """Those of the form."""
        if self.nvfp4:
            return self.nvfp4_views(record)
        if self.span:
            return self.int4_views(record)
        return self.fp8_views(record) if self.fp8 else self.bf12_views(record)

    def int4_views(self, record: Tensor) -> tuple[Int4Matrix, ...]:
        """gate, if there is one, up and down in a record of bytes."""
        return tuple(Int4Matrix.at(*parts, self.span) for parts in self._parts(record, *self.coded_parts()))

    def nvfp4_views(self, record: Tensor) -> tuple[Nvfp4Matrix, ...]:
        """The same of one in NVFP4."""
        return tuple(Nvfp4Matrix.at(*parts) for parts in self._parts(record, *self.coded_parts()))

    def fp8_views(self, record: Tensor) -> tuple[Fp8Matrix, ...]:
        """The same of one in FP8."""
        return tuple(Fp8Matrix.at(*parts) for parts in self._parts(record, *self.coded_parts()))

    def bf12_views(self, record: Tensor) -> tuple[Bf12Matrix, ...]:
        """The same of one in BF12."""
        codes = [bf12_tiles.code_bytes(*shape) for shape in self.matrices]
        sides = [bf12_tiles.WORD_BYTES * bf12_tiles.side_words(*shape) for shape in self.matrices]
        return tuple(Bf12Matrix.at(*parts) for parts in self._parts(record, codes, sides))

    def _parts(
        self, record: Tensor, codes: list[int], sides: list[int]
    ) -> Iterator[tuple[Tensor, Tensor, int, int]]:
        """Of each matrix its codes, what is beside them, and its shape."""
        parts = record[: sum(codes) + sum(sides)].split([*codes, *sides])
        for code, side, shape in zip(parts[: len(codes)], parts[len(codes) :], self.matrices, strict=True):
            yield code, side, *shape
