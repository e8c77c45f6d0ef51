"""Which experts the target asks for: how often lately (heat), and pass by pass in the answer at hand. Asks
for nothing itself, and judges nothing (see prefetch.optimum).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    Event,
    LayerDemanded,
    PassRouted,
    PrefillStarted,
    StepFinished,
    StepStarted,
)

HALF_LIFE = 16  # passes after which a demand counts half
MAX_PASSES = 4096  # of an answer that are kept
MAX_DEMANDS = 400_000  # of an answer, likewise
_DECAY = 0.5 ** (1 / HALF_LIFE)


@dataclass(frozen=True, slots=True)
class AnswerDemands:
    """What an answer's passes asked for.

    Attributes:
        resident: bool (L, E), what was in a slot when the answer began.
        passes: bool (L, E) each, in order.
        counted: whether each pass was a decode step (else a piece of the prompt).
        complete: False if the answer had more passes than are kept, of which these are the first.
    """

    resident: NDArray[np.bool_]
    passes: tuple[NDArray[np.bool_], ...]
    counted: tuple[bool, ...]
    complete: bool

    @property
    def num_counted(self) -> int:
        """Demands of the decode steps."""
        pairs = zip(self.passes, self.counted, strict=True)
        return sum(int(demanded.sum()) for demanded, counted in pairs if counted)


class DemandRecorder:
    """Hears the events of the target's passes from the thread that answers; may be read from any."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        max_passes: int = MAX_PASSES,
        max_demands: int = MAX_DEMANDS,
    ) -> None:
        """max_passes, max_demands: of an answer, that are kept."""
        self._max_passes, self._max_demands = max_passes, max_demands
        self._lock = threading.Lock()
        self._current = np.zeros((num_layers, num_experts), np.bool_)  # of the pass at hand; the writer's own
        self._is_step = False
        self._asked = np.zeros((num_layers, num_experts), np.float32)  # decayed counts
        self._passes_asked = 0.0  # decayed count of passes
        self._resident = np.zeros((num_layers, num_experts), np.bool_)
        self._packed: list[NDArray[np.uint8]] = []
        self._counted: list[bool] = []
        self._num_demands = 0
        self._complete = True

    def begin_answer(self, resident: NDArray[np.bool_]) -> None:
        """Forget the last answer's passes; resident (L, E): what is in slots now. Heat stays."""
        self._end_pass()
        with self._lock:
            self._resident = resident.copy()
            self._packed, self._counted, self._num_demands, self._complete = [], [], 0, True

    def note(self, event: Event) -> None:
        """An event of the answer."""
        match event:
            case LayerDemanded():
                self._current[event.layer, list(event.experts)] = True
            case PassRouted():
                self._current |= event.demanded
            case StepStarted() | PrefillStarted():
                self._end_pass()
                self._is_step = isinstance(event, StepStarted)
            case StepFinished():
                self._end_pass()
            case _:
                pass

    def heat(self) -> NDArray[np.float32]:
        """(L, E): share of the recent passes that asked for each expert, in 0..1; a pass counts half after
        HALF_LIFE further ones."""
        with self._lock:
            return self._asked / np.float32(max(self._passes_asked, 1e-9))

    def answer(self) -> AnswerDemands:
        """The passes of the answer at hand, or of the last one, that have ended."""
        with self._lock:
            packed, counted, resident = list(self._packed), tuple(self._counted), self._resident
            complete = self._complete
        shape = resident.shape
        passes = [np.unpackbits(bits, count=resident.size).astype(np.bool_).reshape(shape) for bits in packed]
        return AnswerDemands(resident.copy(), tuple(passes), counted, complete)

    def _end_pass(self) -> None:
        count = int(self._current.sum())
        if not count:
            return
        with self._lock:
            self._asked *= np.float32(_DECAY)
            self._asked += self._current
            self._passes_asked = self._passes_asked * _DECAY + 1.0
            full = len(self._packed) >= self._max_passes or self._num_demands + count > self._max_demands
            self._complete = self._complete and not full
            if self._complete:
                self._packed.append(np.packbits(self._current))
                self._counted.append(self._is_step)
                self._num_demands += count
        self._current[:] = False
