"""The device arena cut into expert-sized slots, in the compute dtype or, as records in MXFP4 are, of bytes.
Knows no expert; see residency."""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.experts.records import RecordLayout


class DeviceSlots:
    """`num_slots` slots of `slot_elements` words on `device` (on CPU: ordinary RAM standing in for device
    memory)."""

    def __init__(self, num_slots: int, slot_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self._arena = torch.empty(num_slots, slot_elements, dtype=dtype, device=device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self._arena.shape[1] * self._arena.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena."""
        return self._arena.numel() * self._arena.element_size()

    def release(self) -> None:
        """Give the memory back; no slot is left."""
        self.num_slots = 0
        self._arena = self._arena.new_empty(0, 0)

    def write(self, slot: int, record: Tensor) -> None:
        """Copy a flat host record into a slot, converting to the compute dtype (exact from 16 to 32 bits)."""
        self._arena[slot, : record.numel()].copy_(record, non_blocking=True)

    def address(self, slot: int) -> int:
        """Where a slot begins in device memory."""
        return self._arena.data_ptr() + slot * self._arena.stride(0) * self._arena.element_size()

    def lend(self, first: int, count: int) -> Tensor:
        """uint8: the memory of neighbouring slots."""
        return self._arena[first : first + count].view(-1).view(torch.uint8)

    def views(self, slot: int, layout: RecordLayout) -> tuple[Tensor, Tensor]:
        """(gate_up, down) of the expert that lies in a slot."""
        return layout.views(self._arena[slot])
