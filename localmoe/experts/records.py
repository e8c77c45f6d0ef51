"""Layout of one expert's record: [gate_up | down] in one contiguous piece, as 16- or 32-bit weights, or as
they are published in MXFP4. Decides neither where records lie nor when they move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels.mxfp4_tiles import Mxfp4Matrix, can_be_tiled, code_bytes, scale_bytes

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Shapes of the two matrices of an expert, in the orientation of the model's module.

    Attributes:
        gate_up_shape: (2I, H), or (H, 2I) when transposed.
        down_shape: (H, I), or (I, H) when transposed.
        mxfp4: the record is [codes of gate_up | codes of down | scales of gate_up | scales of down], bytes;
            its matrices are (2I, H) and (H, I), whatever the module's are.
    """

    gate_up_shape: tuple[int, int]
    down_shape: tuple[int, int]
    transposed: bool
    mxfp4: bool = False

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
        """(2I, H) and (H, I)."""
        return (2 * self.inner, self.hidden), (self.hidden, self.inner)

    @property
    def fits_mxfp4(self) -> bool:
        """Whether such records can be in MXFP4; gate's and up's rows are whole strips of tiles both."""
        return can_be_tiled(self.inner, self.hidden) and can_be_tiled(self.hidden, self.inner)

    @property
    def mxfp4_bytes(self) -> int:
        """Bytes of a record in MXFP4."""
        return sum(code_bytes(*shape) + scale_bytes(*shape) for shape in self.rows)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights, without padding. dtype: of weights that are not in MXFP4."""
        return self.mxfp4_bytes if self.mxfp4 else self.elements * dtype.itemsize

    def word(self, dtype: torch.dtype) -> torch.dtype:
        """What a record is made of: weights of `dtype`, or bytes."""
        return torch.uint8 if self.mxfp4 else dtype

    def views(self, record: Tensor) -> tuple[Tensor, Tensor]:
        """(gate_up, down) as views of a flat record of `elements` weights."""
        assert not self.mxfp4, "its weights are codes"
        split = self.gate_up_elements
        return record[:split].view(self.gate_up_shape), record[split : self.elements].view(self.down_shape)

    def mxfp4_views(self, record: Tensor) -> tuple[Mxfp4Matrix, Mxfp4Matrix]:
        """(gate_up, down) in a record of bytes."""
        gate_up, down = self.rows
        sizes = [code_bytes(*gate_up), code_bytes(*down), scale_bytes(*gate_up), scale_bytes(*down)]
        codes, more_codes, scales, more_scales = record[: sum(sizes)].split(sizes)
        return Mxfp4Matrix.at(codes, scales, *gate_up), Mxfp4Matrix.at(more_codes, more_scales, *down)
