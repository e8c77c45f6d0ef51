"""CUDA graphs of whole passes: captured when first needed, kept in one memory pool, bounded in number. Knows
neither what a pass computes nor what it is for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_GRAPHS = 24  # a graph of a 48-layer model holds some thousand nodes, and so a few MiB in the driver


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Tensors that a pass leaves; in a graph they are overwritten by its next replay.

    Attributes:
        logits: (T, V).
        report: int32, what the host needs to know, flat.
    """

    logits: Tensor
    report: Tensor


class StepGraphs:
    """Runs passes as graphs where that is possible, else as they are."""

    def __init__(self, enabled: bool) -> None:
        self._graphs: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, PassOutput]] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self._enabled = enabled

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, body: Callable[[], PassOutput]) -> PassOutput:
        """Issue the pass `key`. `body` must have no effect that a second run of it would not repeat."""
        if not self._enabled:
            return body()
        if key not in self._graphs:
            self._graphs[key] = self._capture(body)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _capture(self, body: Callable[[], PassOutput]) -> tuple[torch.cuda.CUDAGraph, PassOutput]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = body()
        return graph, output

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        # a pool goes with its last graph
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
