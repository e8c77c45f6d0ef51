"""Pictures as a model's encoder has made them, kept for the next turns of a chat. Encodes none itself."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from torch import Tensor

_MOST_BYTES: Final = 256 << 20


class KeptFeatures:
    """By the digests of their files, those that were used last."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most_bytes
        self._held: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, digest: bytes) -> Tensor | None:
        """(1 + D, tokens, H) in host RAM, see VisionEncoder.encode."""
        found = self._held.get(digest)
        if found is not None:
            self._held.move_to_end(digest)
        return found

    def keep(self, digest: bytes, features: Tensor) -> None:
        """For later; the last one stays, however large."""
        self._held[digest] = features
        self._held.move_to_end(digest)
        while len(self._held) > 1 and self.num_bytes > self._most:
            self._held.popitem(last=False)

    @property
    def num_bytes(self) -> int:
        """Of RAM."""
        return sum(one.numel() * one.element_size() for one in self._held.values())
