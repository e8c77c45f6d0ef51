"""Layout of one expert's record: [gate_up | down] in one contiguous piece. Decides neither where records lie
nor when they move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Shapes of the two matrices of an expert, in the orientation of the model's module.

    Attributes:
        gate_up_shape: (2I, H), or (H, 2I) when transposed.
        down_shape: (H, I), or (I, H) when transposed.
    """

    gate_up_shape: tuple[int, int]
    down_shape: tuple[int, int]
    transposed: bool

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

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights, without padding."""
        return self.elements * dtype.itemsize

    def views(self, record: Tensor) -> tuple[Tensor, Tensor]:
        """(gate_up, down) as views of a flat record of `elements` weights."""
        split = self.gate_up_elements
        return record[:split].view(self.gate_up_shape), record[split : self.elements].view(self.down_shape)
