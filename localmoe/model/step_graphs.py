"""CUDA graphs of whole passes: captured when first needed, kept in one memory pool, bounded in number. Knows
neither what a pass computes nor what it is for.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from localmoe.core.uninterrupted import uninterrupted
from localmoe.model.side_stream import join_forked

Key = TypeVar("Key", bound=Hashable)
CAPTURE_AT = 4  # the fourth pass of a kind costs as much as capturing it has saved by then
# a graph of some thousand nodes takes 2 to 6 MiB in the driver, which nothing plans one by one
MAX_GRAPHS = 16


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Tensors that a pass leaves; in a graph they are overwritten by its next replay.

    Attributes:
        logits: (T, V); of more than one row, overwritten by the next such pass, whatever its graph.
        report: int32, what the host needs to know, flat.
    """

    logits: Tensor
    report: Tensor


_Captured: TypeAlias = tuple[torch.cuda.CUDAGraph, PassOutput]


def _run(body: Callable[[], PassOutput]) -> PassOutput:
    """As a capture. Where it fails, its branches end: else ending the capture would fail too, which hides
    why, and PyTorch would go on as if it captured."""
    try:
        return body()
    except BaseException:
        join_forked()
        raise


class StepGraphs:
    """Runs passes as graphs where that is possible, else as they are.

    Attributes:
        capture_s: seconds that capturing took so far, in which the answer at hand waits.
    """

    def __init__(self, enabled: bool) -> None:
        self.capture_s = 0.0
        self._wanted: Counter[Hashable] = Counter()
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._enabled = enabled
        self._new_pool()

    def __len__(self) -> int:
        return len(self._graphs)

    def cheapest(self, keys: Iterable[Sequence[Key]]) -> Key:
        """Which of several passes to issue that would all do.

        Args:
            keys: those that cost alike together, the cheapest first. Of these it is one that is captured, or
                else the first, unless that has been wanted a few times only and a dearer one is captured.
        """
        candidates = iter(keys)
        alike = next(candidates)
        found = next((key for key in alike if key in self._graphs), None)
        if found is not None or not self._enabled:
            return alike[0] if found is None else found
        self._wanted[alike[0]] += 1
        if self._wanted[alike[0]] >= CAPTURE_AT:
            return alike[0]
        return next((key for dearer in candidates for key in dearer if key in self._graphs), alike[0])

    def run(self, key: Hashable, body: Callable[[], PassOutput]) -> PassOutput:
        """Issue the pass `key`. `body` must have no effect that a second run of it would not repeat."""
        if not self._enabled:
            return body()
        if key not in self._graphs:
            self._graphs[key], seconds = self._capture(body)
            self.capture_s += seconds
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def capture_ahead(self, keys: Sequence[Key], body: Callable[[Key], PassOutput]) -> bool:
        """While no answer waits: capture the first of these passes that is not captured, and run nothing. One
        that is not among them makes room. False where all are there.

        Args:
            keys: at most MAX_GRAPHS, the likeliest first.
            body: issues the pass of a key, as in `run`.
        """
        assert len(keys) <= MAX_GRAPHS
        missing = next((key for key in keys if key not in self._graphs), None)
        if missing is None or not self._enabled:
            return False
        if len(self._graphs) == MAX_GRAPHS:
            del self._graphs[next(key for key in self._graphs if key not in keys)]
        self._graphs[missing], _ = self._capture(lambda: body(missing))
        return True

    def _capture(self, body: Callable[[], PassOutput]) -> tuple[_Captured, float]:
        """And the seconds that it took, once the GPU had nothing to do. Where `body` fails, its error comes
        out, and nothing is left of it. Ctrl+C waits for the end: it may strike where no branch can be
        joined."""
        join_forked()  # of a pass that failed before
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        # what other threads ask of the driver meanwhile, as how much memory is free, must not fail
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            with uninterrupted(), capture:
                output = _run(body)
        except BaseException:
            if not self._graphs:
                self._new_pool()
            raise
        return (graph, output), time.perf_counter() - started

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._wanted.clear()
        self._new_pool()

    def _new_pool(self) -> None:
        """As a pool goes with its last graph."""
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
