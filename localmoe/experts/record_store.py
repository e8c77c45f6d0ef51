"""What every store of a model's expert records is: their layouts, and their weights in whatever form they are
kept. Where records lie is each store's own: in RAM (host_store), or on the disk (disk_store).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.experts.records import PackedMatrix, RecordLayout
from localmoe.kernels.bf12_tiles import Bf12Matrix
from localmoe.kernels.fp8_tiles import Fp8Matrix
from localmoe.kernels.int4_tiles import Int4Matrix
from localmoe.kernels.mxfp4_tiles import Mxfp4Matrix
from localmoe.kernels.nvfp4_tiles import Nvfp4Matrix
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.float8 import decode_rows
from localmoe.quant.int4 import Int4Rows
from localmoe.quant.mxfp4 import BLOCK_BYTES, decode
from localmoe.quant.nvfp4 import decode_rows as decode_nvfp4


class RecordStore(ABC):
    """Records of a model's experts. `layouts` has one entry a MoE layer. dtype: of the weights, once those of
    records that are codes are decoded.

    Attributes:
        embedding: (V, H) of `dtype`, the input embedding's; None where that is elsewhere.
    """

    def __init__(self, layouts: Sequence[RecordLayout], num_experts: int, dtype: torch.dtype) -> None:
        self.layouts = list(layouts)
        self.num_experts = num_experts
        self.dtype = dtype
        self.embedding: Tensor | None = None

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self.layouts)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of RAM reserved."""

    @property
    def word(self) -> torch.dtype:
        """What records are made of."""
        return self.layouts[0].word(self.dtype)

    @property
    def largest_record(self) -> int:
        """Words of it."""
        return max(layout.num_bytes(self.dtype) for layout in self.layouts) // self.word.itemsize

    @abstractmethod
    def record(self, key: ExpertKey) -> Tensor:
        """Flat words of one expert: (elements,) weights, or bytes."""

    @contextmanager
    def lending(self, key: ExpertKey) -> Iterator[Tensor]:
        """A record where it lies, which it stays until the end."""
        yield self.record(key)

    def note_demand(self, layer: int, experts: Sequence[int]) -> None:
        """A pass of a layer asked for these, wherever they were found: for a store that holds a part of all
        in RAM."""
        del layer, experts

    @property
    def some_record(self) -> Tensor:
        """Words of any, to time copies by."""
        return self.record(ExpertKey(0, 0))

    @abstractmethod
    def device_address(self, key: ExpertKey) -> int:
        """Where kernels find a record."""

    def device_addresses(self) -> NDArray[np.int64]:
        """int64 (L, E): of all, once they are pinned."""
        rows = [
            [self.device_address(ExpertKey(layer, expert)) for expert in range(self.num_experts)]
            for layer in range(self.num_layers)
        ]
        return np.array(rows, dtype=np.int64).reshape(self.num_layers, self.num_experts)

    @property
    @abstractmethod
    def embedding_address(self) -> int:
        """Where kernels find the embedding's table."""

    @abstractmethod
    def pin(self) -> None:
        """Let a GPU reach what it reads of this.

        Raises:
            HardwareError: the driver refuses (usually the locked-memory limit).
        """

    @property
    def read_bytes(self) -> int:
        """From the disk, since it was made."""
        return 0

    @abstractmethod
    def fill(self) -> None:
        """Bring into RAM, while nobody asks for anything, what there is room for. Returns at once."""

    @abstractmethod
    def forget(self) -> None:
        """Be as just loaded; nobody uses a record."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the records."""

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def views(self, key: ExpertKey) -> tuple[Tensor, Tensor]:
        """(gate_up, down) of one expert in plain form."""
        return self.layouts[key.layer].views(self.record(key))

    def mxfp4_views(self, key: ExpertKey) -> tuple[Mxfp4Matrix, Mxfp4Matrix]:
        """The same of one in MXFP4."""
        return self.layouts[key.layer].mxfp4_views(self.record(key))

    def bf12_views(self, key: ExpertKey) -> tuple[Bf12Matrix, ...]:
        """gate, if there is one, up and down of one in BF12."""
        return self.layouts[key.layer].bf12_views(self.record(key))

    def fp8_views(self, key: ExpertKey) -> tuple[Fp8Matrix, ...]:
        """The same of one in FP8."""
        return self.layouts[key.layer].fp8_views(self.record(key))

    def nvfp4_views(self, key: ExpertKey) -> tuple[Nvfp4Matrix, ...]:
        """The same of one in NVFP4."""
        return self.layouts[key.layer].nvfp4_views(self.record(key))

    def int4_views(self, key: ExpertKey) -> tuple[Int4Matrix, ...]:
        """The same of one in INT4."""
        return self.layouts[key.layer].int4_views(self.record(key))

    def packed_views(self, key: ExpertKey) -> tuple[PackedMatrix, ...]:
        """Those of the form, whose matrices are packed one by one."""
        return self.layouts[key.layer].packed_views(self.record(key))

    def weights(self, key: ExpertKey) -> tuple[Tensor, Tensor]:
        """(gate_up, down) of one expert in the orientation of the model's module, to read; codes decoded."""
        return self.matrix(key, 0), self.matrix(key, 1)

    def matrix(self, key: ExpertKey, part: int) -> Tensor:
        """One of the two: gate_up is part 0, down is 1."""
        layout = self.layouts[key.layer]
        if layout.form is WeightForm.PLAIN:
            return self.views(key)[part]
        if layout.bf12:
            *gate_up, down = self.bf12_views(key)
            return down.take() if part else torch.cat([matrix.take() for matrix in gate_up])
        if layout.fp8:
            *halves, last = self.fp8_views(key)
            return torch.cat([decode_rows(*matrix.take()) for matrix in ([last] if part else halves)])
        if layout.nvfp4:
            *some, other = self.nvfp4_views(key)
            return torch.cat([decode_nvfp4(*matrix.take()) for matrix in ([other] if part else some)])
        if layout.span:
            *ints, under = self.int4_views(key)
            return torch.cat(
                [Int4Rows(*matrix.take(), layout.span).decode() for matrix in ([under] if part else ints)]
            )
        matrix = _decoded(self.mxfp4_views(key)[part]).to(self.dtype)
        return matrix.T if layout.transposed else matrix


def _decoded(matrix: Mxfp4Matrix) -> Tensor:
    codes, scales = matrix.take()
    return decode(codes.view(matrix.rows, -1, BLOCK_BYTES), scales)
