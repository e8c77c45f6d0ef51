"""The RAM of a model whose experts lie on the disk: places for some records, and the input embedding's table.
Knows nothing of who is in which place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.experts.host_memory import PinnedPieces, anonymous_memory

_PLACES, _EMBEDDING, _NOTHING = range(3)  # pieces of pinned memory


class RamArena:
    """Attributes:
    embedding: (V, H), or None where that is elsewhere.
    """

    def __init__(self, num_places: int, stride: int, embedding: Tensor | None) -> None:
        """stride: bytes of a place, whole pages."""
        memory = anonymous_memory(num_places * stride)
        self._places = torch.frombuffer(memory, dtype=torch.uint8).view(num_places, stride)
        self._nothing = torch.frombuffer(anonymous_memory(stride), dtype=torch.uint8)
        self._pinned = PinnedPieces()
        self.embedding = embedding

    @property
    def num_places(self) -> int:
        """For records."""
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Reserved."""
        embedding = 0 if self.embedding is None else self.embedding.nbytes
        return self._places.nbytes + self._nothing.nbytes + embedding

    def place(self, number: int, num_bytes: int) -> Tensor:
        """The first bytes of one."""
        return self._places[number, :num_bytes]

    @property
    def nothing_address(self) -> int:
        """Where kernels find a record of zeros."""
        return self._nothing.data_ptr() + self._pinned.shift(_NOTHING)

    @property
    def shift(self) -> int:
        """From a place's address on the host to that on the device."""
        return self._pinned.shift(_PLACES)

    @property
    def embedding_address(self) -> int:
        """Where kernels find the embedding's table."""
        assert self.embedding is not None, "it is elsewhere"
        return self.embedding.data_ptr() + self._pinned.shift(_EMBEDDING)

    def pin(self) -> None:
        """Let a GPU reach all of it. Raises HardwareError, as PinnedPieces."""
        self._pinned.pin(_PLACES, self._places)
        self._pinned.pin(_NOTHING, self._nothing)
        if self.embedding is not None:
            self._pinned.pin(_EMBEDDING, self.embedding)

    def release(self) -> None:
        """Give it back; what is in use elsewhere goes with its last view."""
        self._pinned.release()
        self._places = torch.empty((0, self._places.shape[1]), dtype=torch.uint8)  # a slice would keep all
        self._nothing, self.embedding = torch.empty(0, dtype=torch.uint8), None
