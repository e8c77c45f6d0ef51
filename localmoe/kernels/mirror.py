"""Words that the host writes and kernels read on the device. Decides nothing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mirror:
    """Words on the device that show what was last uploaded, and places on the host to write the next ones to
    in turn: with two of them, whoever uploads before each pass may do so while one other pass is under way.

    Attributes:
        stages: int64 (places, N), those places; pinned where the device is a GPU.
        turn: which of them `upload` takes next.
        words: int64 (N,) on the device.
    """

    def __init__(self, count: int, device: torch.device, places: int = 2) -> None:
        self._on_gpu = device.type == "cuda"
        self._staging = torch.zeros(places, count, dtype=torch.int64, pin_memory=self._on_gpu)
        self.stages: NDArray[np.int64] = self._staging.numpy()
        self.turn = 0
        self.words = torch.zeros(count, dtype=torch.int64, device=device)

    @property
    def host(self) -> NDArray[np.int64]:
        """int64 (N,), what `upload` takes next. It was taken `places` uploads ago, which must have ended."""
        place: NDArray[np.int64] = self.stages[self.turn]
        return place

    def upload(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Bring words [begin, end) to the device in the order of the current stream, and return them there.
        On a GPU a kernel fetches them: a copy would wait behind all expert copies under way, for there is
        one engine for each direction."""
        staging, words = self._staging[self.turn, begin:end], self.words[begin:end]
        self.turn = (self.turn + 1) % len(self.stages)
        if self._on_gpu:
            from localmoe.kernels.gpu.fetch import fetch

            fetch(staging.data_ptr(), words)
        else:
            words.copy_(staging)
        return words
