"""The Expert Lookahead Buffer: what the draft's router chose, token by token and layer by layer.

MoE-SpeQ 3.3.1, equation 6: an entry per (token, layer) with expert ids and confidence scores. Filled while
the draft runs, read by policies and by the statistics. Decides no prefetch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localmoe.core.types import ExpertKey


@dataclass(frozen=True, slots=True)
class LookaheadEntry:
    """Predicted routing of one token at one layer: expert ids, most confident first, with their router
    weights."""

    experts: tuple[int, ...]
    confidences: tuple[float, ...]


class LookaheadBuffer:
    """[token][layer] -> LookaheadEntry for one speculative window."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._entries: list[dict[int, LookaheadEntry]] = []

    def clear(self) -> None:
        """Forget the window."""
        self._entries.clear()

    def record(self, token: int, layer: int, entry: LookaheadEntry) -> None:
        """Store one entry; tokens arrive in order, layers within a token in any order."""
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
        assert 0 <= token <= len(self._entries), f"token {token} after {len(self._entries)} tokens"
        if token == len(self._entries):
            self._entries.append({})
        self._entries[token][layer] = entry

    @property
    def num_tokens(self) -> int:
        """Window tokens seen so far."""
        return len(self._entries)

    def get(self, token: int, layer: int) -> LookaheadEntry | None:
        """The entry, or None where the draft has not been."""
        return self._entries[token].get(layer) if token < len(self._entries) else None

    def layer_experts(self, layer: int) -> frozenset[int]:
        """Union of the experts that the window needs at a layer."""
        found = (entry.get(layer) for entry in self._entries)
        return frozenset(expert for entry in found if entry is not None for expert in entry.experts)

    def keys(self) -> Iterator[ExpertKey]:
        """Distinct expert keys of the window, by layer."""
        for layer in range(self.num_layers):
            for expert in sorted(self.layer_experts(layer)):
                yield ExpertKey(layer, expert)
