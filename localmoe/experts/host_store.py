"""All routed experts in host RAM, in the checkpoint's own dtype or form: one page-aligned record an expert.
The table of the input embedding lies beside them, where it is kept there.

Memory is anonymous mmap (page-aligned, committed when written, in huge pages where the system has them) and,
for a GPU, registered in place so that copies run at full link speed. Decides nothing about what is copied.
"""

from __future__ import annotations

import logging
import mmap
import sys
from contextlib import suppress
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.errors import BudgetError, HardwareError
from localmoe.core.types import ExpertKey
from localmoe.core.units import format_bytes
from localmoe.experts.records import PAGE_BYTES, RecordLayout
from localmoe.kernels.bf12_tiles import Bf12Matrix
from localmoe.kernels.cuda_driver import DriverCallError, device_address
from localmoe.kernels.mxfp4_tiles import Mxfp4Matrix
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.mxfp4 import BLOCK_BYTES, decode

_LOG = logging.getLogger(__name__)
_EMBEDDING = -1  # in a layer's place


class HostStore:
    """Records of `num_layers` x `num_experts` experts; `layouts` has one entry a MoE layer. dtype: of the
    weights, once those of records that are codes are decoded.

    Attributes:
        embedding: (V, H) of `dtype`, the input embedding's; None where that is elsewhere.
    """

    def __init__(
        self,
        layouts: list[RecordLayout],
        num_experts: int,
        dtype: torch.dtype,
        embedding: tuple[int, int] | None = None,
    ) -> None:
        self.layouts = layouts
        self.num_experts = num_experts
        self.dtype = dtype
        self._registered: dict[int, int] = {}  # layer -> address
        self._shifts: dict[int, int] = {}  # layer -> from its address on the host to that on the device
        self._layers = [self._allocate(layout) for layout in layouts]
        self.embedding = None if embedding is None else self._allocate_embedding(*embedding)
        self._records: dict[ExpertKey, Tensor] = {}  # that were asked for: to make one takes 5 us

    def _allocate(self, layout: RecordLayout) -> Tensor:
        stride = -(-layout.num_bytes(self.dtype) // PAGE_BYTES) * PAGE_BYTES
        memory = _anonymous_memory(stride * self.num_experts)  # kept alive by the tensor
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.num_experts, stride)

    def _allocate_embedding(self, rows: int, columns: int) -> Tensor:
        num_bytes = rows * columns * self.dtype.itemsize
        memory = _anonymous_memory(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
        return torch.frombuffer(memory, dtype=self.dtype, count=rows * columns).view(rows, columns)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        embedding = 0 if self.embedding is None else self.embedding.nbytes
        return sum(layer.numel() for layer in self._layers) + embedding

    @property
    def word(self) -> torch.dtype:
        """What records are made of."""
        return self.layouts[0].word(self.dtype)

    @property
    def largest_record(self) -> int:
        """Words of it."""
        return max(layout.num_bytes(self.dtype) for layout in self.layouts) // self.word.itemsize

    def record(self, key: ExpertKey) -> Tensor:
        """Flat words of one expert: (elements,) weights, or bytes."""
        record = self._records.get(key)
        if record is None:
            layout = self.layouts[key.layer]
            num_bytes = layout.num_bytes(self.dtype)
            record = self._layers[key.layer][key.expert, :num_bytes].view(layout.word(self.dtype))
            self._records[key] = record
        return record

    def device_address(self, key: ExpertKey) -> int:
        """Where kernels find a record: its address in host memory, unless the device sees that elsewhere."""
        return self.record(key).data_ptr() + self._shifts.get(key.layer, 0)

    def device_addresses(self) -> NDArray[np.int64]:
        """int64 (L, E): where kernels find each record, once all are pinned."""
        rows = [
            [self.device_address(ExpertKey(layer, expert)) for expert in range(self.num_experts)]
            for layer in range(self.num_layers)
        ]
        return np.array(rows, dtype=np.int64).reshape(self.num_layers, self.num_experts)

    @property
    def embedding_address(self) -> int:
        """Where kernels find the embedding's table."""
        assert self.embedding is not None, "it is elsewhere"
        return self.embedding.data_ptr() + self._shifts.get(_EMBEDDING, 0)

    def views(self, key: ExpertKey) -> tuple[Tensor, Tensor]:
        """(gate_up, down) of one expert in plain form, writable."""
        return self.layouts[key.layer].views(self.record(key))

    def mxfp4_views(self, key: ExpertKey) -> tuple[Mxfp4Matrix, Mxfp4Matrix]:
        """The same of one in MXFP4."""
        return self.layouts[key.layer].mxfp4_views(self.record(key))

    def bf12_views(self, key: ExpertKey) -> tuple[Bf12Matrix, ...]:
        """gate, if there is one, up and down of one in BF12."""
        return self.layouts[key.layer].bf12_views(self.record(key))

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
        matrix = _decoded(self.mxfp4_views(key)[part]).to(self.dtype)
        return matrix.T if layout.transposed else matrix

    def pin(self) -> None:
        """Register all of it with the CUDA driver, in place; layers that are registered stay so.

        Raises:
            HardwareError: the driver refuses (usually the locked-memory limit).
        """
        for layer in range(self.num_layers):
            self.pin_layer(layer)
        if self.embedding is not None:
            self._pin(_EMBEDDING, self.embedding)

    def pin_layer(self, layer: int) -> None:
        """Register one layer's records, while other layers may be written. Call it from one thread at a time.

        Raises:
            HardwareError: the driver refuses; the store is closed.
        """
        self._pin(layer, self._layers[layer])

    def _pin(self, layer: int, memory: Tensor) -> None:
        if layer in self._registered:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code != 0:
            wanted = format_bytes(self.num_bytes)
            self.close()
            raise HardwareError(
                f"The CUDA driver refused to pin {wanted} of host memory "
                f"(error {code}): close other programs or choose a smaller model."
            )
        self._registered[layer] = memory.data_ptr()
        try:
            self._shifts[layer] = device_address(memory.data_ptr()) - memory.data_ptr()
        except DriverCallError as error:
            _LOG.warning("the GPU is taken to find pinned memory where the host does: %s", error)

    def close(self) -> None:
        """Unregister pinned memory and let go of the records; memory in use elsewhere goes with its last
        view."""
        for pointer in self._registered.values():
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._registered.clear()
        self._shifts.clear()
        self._layers = []
        self.embedding = None
        self._records = {}

    def __enter__(self) -> HostStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _decoded(matrix: Mxfp4Matrix) -> Tensor:
    codes, scales = matrix.take()
    return decode(codes.view(matrix.rows, -1, BLOCK_BYTES), scales)


def _anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed pages, committed when first written. Private ones: the kernel gives huge pages to shared memory
    only where an administrator allows it, and small pages make the first touch many times slower.

    Raises:
        BudgetError: the system refuses it, which it may though so much is free.
    """
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetError(
            f"The system refuses {format_bytes(num_bytes)} of RAM for weights ({error.strerror or error}): "
            "raise the limit of this process (ulimit -v) or of all (vm.overcommit_memory), or use a smaller "
            "model."
        ) from error
    if sys.platform == "linux":
        # a forked child would get a copy of every pinned page at once, so it gets none of them
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(advice)
    return memory
