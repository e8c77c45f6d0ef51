"""What the window at hand needs, as the draft's routing tells it: the lookahead buffer of MoE-SpeQ 3.3.1 in
the form that a policy decides by. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class WindowNeeds:
    """Of every expert: how many window tokens want it, and whether one of them is sure of it.

    Attributes:
        wanted: int32 (L, E), tokens that want it; 0 once its layer is done.
        sure: bool (L, E), wanted by token 0 (verified in any case), with at least half an equal share of the
            router's weight, or by several tokens.
        routed: bool (T, L, E), what each of the T window tokens so far wants, whatever is done by now.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        from localmoe.prefetch import loops  # compiles; not needed before there is a policy

        self._loops = loops
        self.wanted = np.zeros((num_layers, num_experts), dtype=np.int32)
        self.sure = np.zeros((num_layers, num_experts), dtype=np.bool_)
        self.routed = np.zeros((0, num_layers, num_experts), dtype=np.bool_)
        self._room = self.routed  # for more tokens; what is not in `routed` is False
        self._experts = np.zeros((num_layers, 0), dtype=np.int32)  # of a token, as the loops take them
        self._confidences = np.zeros((num_layers, 0), dtype=np.float32)

    def clear(self) -> None:
        """Another window begins."""
        self.wanted[:] = 0
        self.sure[:] = False
        self.routed[:] = False
        self.routed = self._room[:0]

    def add_layer(self, token: int, layer: int, experts: Sequence[int], confidences: Sequence[float]) -> None:
        """One token's choices at one layer. An index outside the experts means "none"."""
        self._make_room(token)
        routed, wanted, sure = self.routed[token][layer], self.wanted[layer], self.sure[layer]
        total = sum(confidences)
        for expert, confidence in zip(experts, confidences, strict=True):
            if 0 <= expert < len(wanted):
                routed[expert] = True
                wanted[expert] += 1
                if token == 0 or 2 * len(experts) * confidence >= total or wanted[expert] > 1:
                    sure[expert] = True

    def _make_room(self, token: int) -> None:
        if token >= len(self._room):
            self._room = np.zeros((max(8, 2 * token), *self.wanted.shape), dtype=np.bool_)
            self._room[: len(self.routed)] = self.routed
        if token >= len(self.routed):
            self.routed = self._room[: token + 1]

    def add_token(self, token: int, experts: NDArray[np.integer], confidences: NDArray[np.floating]) -> None:
        """One token's choices at all layers, (L, K) each."""
        self._make_room(token)
        if self._experts.shape != experts.shape:
            self._experts = np.empty(experts.shape, dtype=np.int32)
            self._confidences = np.empty(experts.shape, dtype=np.float32)
        self._experts[:], self._confidences[:] = experts, confidences
        self._loops.note_token(token, self._experts, self._confidences, self.wanted, self.sure, self.routed)

    def layer_done(self, layer: int) -> None:
        """The target needs nothing of this layer any more."""
        self.wanted[layer] = 0
