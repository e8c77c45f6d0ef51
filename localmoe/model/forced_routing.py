"""Simulated routing where passes on a GPU read it: routers' choices that a simulation prescribes, uploaded
before the pass. Simulates nothing itself.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.types import Phase
from localmoe.kernels.mirror import Mirror
from localmoe.model.synthetic import SyntheticModel


class ForcedRouting:
    """Choices of the positions of one window, for the draft, for the target, and foretold of the target."""

    def __init__(self, positions: int, device: torch.device) -> None:
        """positions: the most of a window."""
        self._positions = positions
        self._device = device
        self._mirrors: dict[str, Mirror] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def upload(self, synthetic: SyntheticModel | None, phase: Phase, start: int, count: int) -> None:
        """What the simulation routes the positions from `start` on to; nothing without one."""
        if synthetic is None or not count:
            return
        forced = synthetic.forced(phase, start, count)
        if forced is None:
            return
        self._put("draft" if phase == "draft" else "target", forced)
        if phase != "draft" and count == 1 and synthetic.settings.match is not None:
            self._put("foretold", synthetic.draft_window(start, 1))

    def _put(self, kind: str, forced: NDArray[np.int64]) -> None:
        if kind not in self._mirrors:
            # a step uploads for its drafts twice, the first time behind the verify pass before it
            self._mirrors[kind] = Mirror(self._positions * forced[0].size, self._device, places=4)
            self._shapes[kind] = forced.shape[1:]
        self._mirrors[kind].host[: forced.size] = forced.reshape(-1)
        self._mirrors[kind].upload(0, forced.size)

    def of_draft(self, cursor: Tensor) -> Tensor | None:
        """(1, L, K) int64 of the token that the draft is at, int64 (1,), or None where its routers decide."""
        found = self._view("draft")
        return None if found is None else found.index_select(0, cursor)

    def of_target(self) -> Tensor | None:
        """(positions, L, K) int64, or None where the routers decide."""
        return self._view("target")

    def of_foretold(self) -> Tensor | None:
        """(1, L, K) int64, what is said ahead of a window of one token, as good as a draft's routing, or None
        where the routers say it."""
        found = self._view("foretold")
        return None if found is None else found[:1]

    def clear(self) -> None:
        """Forget all."""
        self._mirrors.clear()
        self._shapes.clear()

    def _view(self, kind: str) -> Tensor | None:
        if kind not in self._mirrors:
            return None
        return self._mirrors[kind].words.view(-1, *self._shapes[kind])
