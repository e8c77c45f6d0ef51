"""The residency table on the device: one row a MoE layer, uploaded whole before a target pass that the host
prepares. Kernels keep it up to date within passes, and log what they found, from which the host follows.

Copies that end during a pass show in `done`, which the copy stream writes. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.experts.landing import LANDING_SLOTS
from localmoe.kernels.mirror import Mirror
from localmoe.kernels.residency import CLOCK_WORDS, ON_HOST, WAITED_NS, ResidencyView

_LONGEST_NS = 2**31 - 1


class ResidencyBlock:
    """Device tensors of the table for L layers of E experts.

    Attributes:
        home: int64 (L, E) on the device, addresses of the host's records.
        done: int64 (1,) on the device, number of the last complete copy.
        log: int32 (L, E) on the device, how each expert was found in the last pass.
        clocks: int64 (L, CLOCK_WORDS), by which layers measure what they waited in the last pass; or None.
    """

    def __init__(
        self, num_layers: int, num_experts: int, device: torch.device, expert_ns: Sequence[int] | None = None
    ) -> None:
        """expert_ns: for each layer, what reading an expert from device memory takes; None: nobody measures
        what is waited for."""
        cells, shape = num_layers * num_experts, (num_layers, num_experts)
        sizes = (cells, cells, num_layers * LANDING_SLOTS, -(-cells // 2))
        self._mirror = Mirror(sum(sizes), device)
        self._bounds: list[int] = np.cumsum(sizes[:-1]).tolist()
        self._stages = [self._parts_of(stage, shape) for stage in self._mirror.stages]
        self._home: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.home = torch.zeros(shape, dtype=torch.int64, device=device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        self.log = torch.zeros(shape, dtype=torch.int32, device=device)
        self._expert_ns = expert_ns or [0] * num_layers
        self.clocks: Tensor | None = None
        if expert_ns is not None:
            self.clocks = torch.zeros((num_layers, CLOCK_WORDS), dtype=torch.int64, device=device)
        on_device = self._mirror.words.split(sizes)
        self._address = on_device[0].view(shape)
        self._ticket = on_device[1].view(shape)
        self._landing = on_device[2].view(num_layers, LANDING_SLOTS)
        self._score = on_device[3].view(torch.float32)[:cells].view(shape)

    def _parts_of(self, stage: NDArray[np.int64], shape: tuple[int, int]) -> tuple[NDArray[Any], ...]:
        """Addresses, tickets, landing slots and scores of a place on the host, of the shapes that `upload` is
        given."""
        address, ticket, free, score = np.split(stage, self._bounds)
        scores = score.view(np.float32)[: address.size].reshape(shape)
        return address.reshape(shape), ticket.reshape(shape), free.reshape(shape[0], -1), scores

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        tensors = (self._mirror.words, self.home, self.log, self.done, self.clocks)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def waited_ns(self) -> Tensor:
        """int32 (L,) on the device: nanoseconds that each layer waited for experts in the last pass; zeros
        where nobody measures that."""
        if self.clocks is None:
            return self.log.new_zeros(len(self.log))
        return self.clocks[:, WAITED_NS].clamp(max=_LONGEST_NS).int()

    def settle(self, addresses: NDArray[np.int64]) -> None:
        """Where kernels find the host's records, int64 (L, E), for good."""
        self._home = addresses
        self.home.copy_(torch.from_numpy(addresses))

    def upload(
        self,
        here: NDArray[np.bool_],
        slots: NDArray[np.int64],
        tickets: NDArray[np.int64],
        landing: NDArray[np.int64],
        scores: NDArray[np.float32],
    ) -> None:
        """Bring the table to the device, in the order of the current stream. Two passes may be under way, see
        kernels.mirror.

        Args:
            here: (L, E), in a slot or on its way there.
            slots, tickets: (L, E), addresses of slots and numbers of copies; of no meaning where not `here`.
            landing: (L, LANDING_SLOTS), addresses of free slots, then zeros.
            scores: (L, E), the lowest makes room, infinite ones never do.
        """
        address, ticket, free, score = self._stages[self._mirror.turn]
        address[:], ticket[:], free[:], score[:] = self._home, ON_HOST, landing, scores
        np.copyto(address, slots, where=here)
        np.copyto(ticket, tickets, where=here)
        self._mirror.upload()

    def upload_scores(self, scores: NDArray[np.float32]) -> None:
        """The scores alone: the rest is as the pass before leaves it."""
        self._stages[self._mirror.turn][-1][:] = scores
        self._mirror.upload(self._bounds[-1])

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
            None if self.clocks is None else self.clocks[layer],
            self._expert_ns[layer],
        )
