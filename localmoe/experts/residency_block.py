"""The residency table on the device: one row a MoE layer, uploaded whole before a target pass that the host
prepares. Kernels keep it up to date within passes, and log what they found, from which the host follows.

Copies that end during a pass show in `done`, which the copy stream writes. Decides nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from localmoe.kernels.mirror import Mirror
from localmoe.kernels.residency import ResidencyView

LANDING_SLOTS = 16  # free slots that one layer may fill with its misses in one pass


class ResidencyBlock:
    """Device tensors of the table for L layers of E experts, and what is uploaded to them next.

    Attributes:
        home: int64 (L, E) on the device, addresses of the host's records.
        done: int64 (1,) on the device, number of the last complete copy.
        log: int32 (L, E) on the device, how each expert was found in the last pass.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        cells, shape = num_layers * num_experts, (num_layers, num_experts)
        sizes = (cells, cells, num_layers * LANDING_SLOTS, -(-cells // 2))
        self._mirror = Mirror(sum(sizes), device)
        self._first_score = sum(sizes[:-1])
        self.home = torch.zeros(shape, dtype=torch.int64, device=device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        self.log = torch.zeros(shape, dtype=torch.int32, device=device)
        on_device = self._mirror.words.split(sizes)
        self._address = on_device[0].view(shape)
        self._ticket = on_device[1].view(shape)
        self._landing = on_device[2].view(num_layers, LANDING_SLOTS)
        self._score = on_device[3].view(torch.float32)[:cells].view(shape)

    @property
    def address(self) -> NDArray[np.int64]:
        """int64 (L, E), where each expert's weights lie; uploaded next."""
        cells = self.home.numel()
        return self._mirror.host[:cells].reshape(self.home.shape)

    @property
    def ticket(self) -> NDArray[np.int64]:
        """int64 (L, E), see kernels.residency; uploaded next."""
        cells = self.home.numel()
        return self._mirror.host[cells : 2 * cells].reshape(self.home.shape)

    @property
    def landing(self) -> NDArray[np.int64]:
        """int64 (L, LANDING_SLOTS), addresses of free slots, then zeros; uploaded next."""
        return self._mirror.host[2 * self.home.numel() : self._first_score].reshape(self._landing.shape)

    @property
    def score(self) -> NDArray[np.float32]:
        """float32 (L, E), the lowest makes room, infinite ones never do; uploaded next."""
        scores = self._mirror.host[self._first_score :].view(np.float32)
        return scores[: self.home.numel()].reshape(self.home.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        tensors = (self._mirror.words, self.home, self.log, self.done)
        return sum(tensor.nbytes for tensor in tensors)

    def upload(self) -> None:
        """Bring all that was written to the device, in the order of the current stream; see kernels.mirror
        for when the next may be written."""
        self._mirror.upload()

    def upload_scores(self) -> None:
        """The scores alone: the rest is as the pass before leaves it."""
        self._mirror.upload(self._first_score)

    def view(self, layer: int) -> ResidencyView:
        """A layer's rows on the device."""
        return ResidencyView(
            self._address[layer],
            self.home[layer],
            self._ticket[layer],
            self._score[layer],
            self._landing[layer],
            self.done,
            self.log[layer],
        )
