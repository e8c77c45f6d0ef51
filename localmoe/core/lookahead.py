"""The Expert Lookahead Buffer: what the draft's router chose, token by token and layer by layer.

MoE-SpeQ 3.3.1, equation 6: an entry per (token, layer) with expert ids and confidence scores. Filled while
the draft runs, read by the statistics; policies keep their own view of the window (prefetch.window_needs),
made of the same events. Decides no prefetch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenArrays = tuple[NDArray[np.int32], NDArray[np.float32]]  # experts and confidences, (L, K) each


@dataclass(frozen=True, slots=True)
class LookaheadEntry:
    """Predicted routing of one token at one layer: expert ids, most confident first, with their router
    weights."""

    experts: tuple[int, ...]
    confidences: tuple[float, ...]


class LookaheadBuffer:
    """[token][layer] -> LookaheadEntry for one speculative window. A token's layers come one by one
    (`record`), or all at once as arrays (`record_token`)."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._entries: list[dict[int, LookaheadEntry] | TokenArrays] = []

    def clear(self) -> None:
        """Forget the window."""
        self._entries.clear()

    def record(self, token: int, layer: int, entry: LookaheadEntry) -> None:
        """Store one entry; tokens arrive in order, layers within a token in any order."""
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
        assert 0 <= token <= len(self._entries), f"token {token} after {len(self._entries)} tokens"
        if token == len(self._entries):
            self._entries.append({})
        entries = self._entries[token]
        assert isinstance(entries, dict), f"token {token} was recorded as a whole"
        entries[layer] = entry

    def record_token(self, experts: NDArray[np.int32], confidences: NDArray[np.float32]) -> None:
        """Store the next token's entries at all layers, (L, K) each."""
        assert len(experts) == self.num_layers, f"{len(experts)} layers of {self.num_layers}"
        self._entries.append((experts, confidences))

    @property
    def num_tokens(self) -> int:
        """Window tokens seen so far."""
        return len(self._entries)

    def get(self, token: int, layer: int) -> LookaheadEntry | None:
        """The entry, or None where the draft has not been."""
        if token >= len(self._entries):
            return None
        entries = self._entries[token]
        if isinstance(entries, dict):
            return entries.get(layer)
        experts, confidences = entries
        return LookaheadEntry(tuple(experts[layer].tolist()), tuple(confidences[layer].tolist()))

    def token_experts(self, token: int) -> NDArray[np.int32] | None:
        """int (L, K) of a token that was recorded as a whole, else None."""
        entries = self._entries[token] if token < len(self._entries) else None
        return entries[0] if isinstance(entries, tuple) else None
