"""Records the routing of a model while it runs, for core.routing_trace to keep. Routes nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.routing_trace import RoutingTrace


class RoutingRecorder:
    """Collects the target's routing, layer by layer, pass by pass; RoutedExperts calls `record`."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[list[NDArray[np.int16]]] = [[] for _ in range(num_layers)]
        self._starts: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that all layers have routed."""
        return min(sum(len(part) for part in layer) for layer in self._layers)

    def begin(self) -> None:
        """The tokens of another prompt follow; a prompt that had none is forgotten."""
        if not self._starts or self._starts[-1] < self.num_tokens:
            self._starts.append(self.num_tokens)

    def record(self, layer: int, index: Tensor) -> None:
        """Keep one pass of one MoE layer; index (T, K), no padding rows."""
        self._layers[layer].append(index.cpu().numpy().astype(np.int16))

    def trace(self, model: str, num_experts: int) -> RoutingTrace:
        """All that was recorded, of a pass that was interrupted nothing."""
        assert self._starts and self.num_tokens, "nothing was recorded"
        whole = self.num_tokens
        experts = np.stack([np.concatenate(layer)[:whole] for layer in self._layers], axis=1)
        starts = [start for start in self._starts if start < len(experts)]
        return RoutingTrace(model, num_experts, experts, np.array(starts, np.int64))
