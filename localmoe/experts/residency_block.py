"""The residency table on the device: one row a MoE layer, uploaded whole before each target pass.

The host owns the table and keeps a mirror; kernels only read it, but for their log of what they found. Copies
that end during a pass show in `done`, which the copy stream writes. Decides nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from localmoe.kernels.residency import ResidencyView

LANDING_SLOTS = 16  # free slots that one layer may fill with its misses in one pass


class ResidencyBlock:
    """Device tensors of the table for L layers of E experts, and their staging copies in host memory.

    Attributes:
        address: int64 (L, E) staging, where each expert's weights lie.
        ticket: int64 (L, E) staging, see kernels.residency.
        landing: int64 (L, LANDING_SLOTS) staging, addresses of free slots, then zeros.
        score: float32 (L, E) staging, the lowest makes room; infinite ones never do.
        done: int64 (1,) on the device, number of the last complete copy.
        log: int32 (L, E) on the device, how each expert was found in the last pass.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        cells = num_layers * num_experts
        sizes = (cells, cells, num_layers * LANDING_SLOTS, -(-cells // 2))
        pinned = device.type == "cuda"
        self._staging = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        self.log = torch.zeros(num_layers, num_experts, dtype=torch.int32, device=device)
        host = [part.numpy() for part in self._staging.split(sizes)]
        shape = (num_layers, num_experts)
        self.address: NDArray[np.int64] = host[0].reshape(shape)
        self.ticket: NDArray[np.int64] = host[1].reshape(shape)
        self.landing: NDArray[np.int64] = host[2].reshape(num_layers, LANDING_SLOTS)
        self.score: NDArray[np.float32] = host[3].view(np.float32)[:cells].reshape(shape)
        on_device = self._device.split(sizes)
        self._address = on_device[0].view(shape)
        self._ticket = on_device[1].view(shape)
        self._landing = on_device[2].view(num_layers, LANDING_SLOTS)
        self._score = on_device[3].view(torch.float32)[:cells].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes + self.log.nbytes + self.done.nbytes

    def upload(self) -> None:
        """Copy the staging tensors to the device, in the order of the current stream. The staging must not be
        changed before that copy has ended."""
        self._device.copy_(self._staging, non_blocking=True)

    def view(self, layer: int) -> ResidencyView:
        """A layer's rows on the device."""
        return ResidencyView(
            self._address[layer],
            self._ticket[layer],
            self._score[layer],
            self._landing[layer],
            self.done,
            self.log[layer],
        )
