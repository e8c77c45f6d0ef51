"""All routed experts in host RAM, in the checkpoint's own dtype or form: one page-aligned record an expert.
The table of the input embedding lies beside them, where it is kept there.

Memory is anonymous mmap (page-aligned, committed when written, in huge pages where the system has them) and,
for a GPU, registered in place so that copies run at full link speed. Decides nothing about what is copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from localmoe.core.errors import HardwareError
from localmoe.core.types import ExpertKey
from localmoe.experts.host_memory import PinnedPieces, anonymous_memory, embedding_table
from localmoe.experts.record_store import RecordStore
from localmoe.experts.records import RecordLayout, record_stride

_EMBEDDING = -1  # in a layer's place


class HostStore(RecordStore):
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
        *,
        memory: Callable[[int], mmap.mmap] | None = None,
    ) -> None:
        """memory: gives so many zeroed bytes, for each layer in turn; None: of RAM."""
        super().__init__(layouts, num_experts, dtype)
        self._pinned = PinnedPieces()  # by layer
        self._layers = [self._allocate(layout, memory or anonymous_memory) for layout in layouts]
        if embedding is not None:
            self.embedding = self._allocate_embedding(embedding)
        self._records: dict[ExpertKey, Tensor] = {}  # that were asked for: to make one takes 5 us

    def _allocate(self, layout: RecordLayout, memory: Callable[[int], mmap.mmap]) -> Tensor:
        stride = record_stride(layout, self.dtype)
        taken = memory(stride * self.num_experts)  # kept alive by the tensor
        return torch.frombuffer(taken, dtype=torch.uint8).view(self.num_experts, stride)

    def _allocate_embedding(self, shape: tuple[int, int]) -> Tensor:
        return embedding_table(shape, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of RAM reserved."""
        embedding = 0 if self.embedding is None else self.embedding.nbytes
        return sum(layer.numel() for layer in self._layers) + embedding

    def record(self, key: ExpertKey) -> Tensor:
        """Flat words of one expert, writable: (elements,) weights, or bytes."""
        record = self._records.get(key)
        if record is None:
            layout = self.layouts[key.layer]
            num_bytes = layout.num_bytes(self.dtype)
            record = self._layers[key.layer][key.expert, :num_bytes].view(layout.word(self.dtype))
            self._records[key] = record
        return record

    def device_address(self, key: ExpertKey) -> int:
        """Where kernels find a record: its address in host memory, unless the device sees that elsewhere."""
        return self.record(key).data_ptr() + self._pinned.shift(key.layer)

    @property
    def embedding_address(self) -> int:
        """Where kernels find the embedding's table."""
        assert self.embedding is not None, "it is elsewhere"
        return self.embedding.data_ptr() + self._pinned.shift(_EMBEDDING)

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

    def _pin(self, number: int, memory: Tensor) -> None:
        try:
            self._pinned.pin(number, memory, self.num_bytes)
        except HardwareError:
            self.close()
            raise

    def fill(self) -> None:
        """All are there."""

    def forget(self) -> None:
        """All stay there."""

    def close(self) -> None:
        """Unregister pinned memory and let go of the records; memory in use elsewhere goes with its last
        view."""
        self._pinned.release()
        self._layers = []
        self.embedding = None
        self._records = {}
