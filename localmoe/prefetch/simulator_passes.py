"""An expert memory in simulated time where whole passes run without the host: the GPU engine's way. Keeps the
rules of experts.device_memory and of the kernel that finds a place for what is missing. Copies and computes
nothing.

The link is shared: copies that were issued run one after the other, and what a layer reads over it itself
takes half of it while any of them runs.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.landing import dealt
from localmoe.experts.queue import CopyQueue
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_types import Experts, Machine


class PassMemory:
    """Slots, their table, and copies in flight."""

    def __init__(self, machine: Machine, scheduler: Scheduler) -> None:
        shape = machine.num_layers, machine.num_experts
        self.now = 0.0
        self.stall_s = 0.0
        self.copies: float = 0
        self.prefetched = self.wasted = 0
        self.computed = np.zeros(shape, dtype=np.bool_)  # by the CPU, in whole, in the last pass
        self.free = machine.num_slots
        self._machine = machine
        self._scheduler = scheduler
        self._here = np.zeros(shape, dtype=np.bool_)
        self._running = np.zeros(shape, dtype=np.bool_)  # its copy is not complete
        self._unused = np.zeros(shape, dtype=np.bool_)
        self._guarded = np.zeros(shape, dtype=np.bool_)
        self._last_use = np.zeros(shape, dtype=np.int64)
        self._queue = CopyQueue()
        self._copies: deque[ExpertKey] = deque()
        self._left_s = 0.0  # of the first of them
        self._passes = 0

    @property
    def lock(self) -> AbstractContextManager[object]:
        """There is one thread."""
        return nullcontext()

    @property
    def reads(self) -> int:
        """Experts that came from the disk."""
        return 0

    @property
    def may_copy(self) -> bool:
        """Whether any expert is not in a slot."""
        return not bool(self._here.all())

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in a slot, or on its way there."""
        return self._here

    def begin_answer(self) -> None:
        """What was prefetched for the answer before is no waste of the next one, as in an engine."""
        self._unused[:] = False

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need."""
        if not self._here[key]:
            self._queue.push(key, deadline)

    def drop_prefetches(self, layer: int | None = None) -> None:
        """Withdraw what has not started; what a window prefetched may make room again when it is over."""
        self._queue.drop_prefetches(layer)
        if layer is None:
            self._guarded[:] = False

    # -- time

    def advance(self, seconds: float) -> None:
        """Let time pass; copies have the link for themselves."""
        self.now += seconds
        while self._copies and self._left_s <= seconds:
            seconds -= self._left_s
            self._complete()
        self._left_s -= seconds if self._copies else 0.0

    def _complete(self) -> None:
        self._running[self._copies.popleft()] = False
        self._left_s = self._machine.copy_s

    def _read_over_link(self, seconds: float) -> None:
        """What takes `seconds` of the link alone, and twice that beside copies."""
        while seconds > 0:
            if not self._copies:
                self.now += seconds
                return
            both = min(seconds, self._left_s)
            self.now += 2 * both
            seconds -= both
            self._left_s -= both
            if self._left_s <= 0:
                self._complete()

    def _wait_for(self, layer: int, experts: NDArray[np.bool_]) -> None:
        waited_from = self.now
        while bool((self._running[layer] & experts).any()):
            self.advance(self._left_s)
        self.stall_s += self.now - waited_from

    # -- slots

    def pump(self) -> None:
        """Issue the copies that wait, as far as there is room."""
        if not len(self._queue):
            return
        scores, per_layer = self._room()
        for key, _ in list(self._queue.in_order()):
            if not self._take_slot(key, scores, per_layer):
                if not per_layer:
                    return
                continue
            self._queue.remove(key)
            self._issue(key)
            self._unused[key] = self._guarded[key] = True
            self.prefetched += 1

    def _room(self) -> tuple[NDArray[np.float32], bool]:
        scores, per_layer = self._scheduler.keep_scores(self._last_use)
        return np.where(self._here & ~self._guarded, scores, np.float32(np.inf)), per_layer

    def _take_slot(self, key: ExpertKey, scores: NDArray[np.float32], per_layer: bool) -> bool:
        if self.free:
            self.free -= 1
            return True
        if per_layer:
            victim = ExpertKey(key.layer, int(scores[key.layer].argmin()))
        else:
            victim = ExpertKey(*divmod(int(scores.argmin()), scores.shape[1]))
        if not np.isfinite(scores[victim]):
            return False
        scores[victim] = np.inf
        self._evict(victim)
        return True

    def _evict(self, key: ExpertKey) -> None:
        self.wasted += bool(self._unused[key])
        self._here[key] = self._unused[key] = self._guarded[key] = False

    def _issue(self, key: ExpertKey) -> None:
        if not self._copies:
            self._left_s = self._machine.copy_s
        self._copies.append(key)
        self._here[key] = self._running[key] = True
        self.copies += 1

    # -- passes

    def note_prompt(self, chosen: Experts) -> None:
        """What the tokens of the prompt's pass that has run chose, (n, L, K)."""

    def begin_step(self, drafted: int) -> None:
        """The next pass is behind so many drafts."""

    def run_pass(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """A target pass, of which so many `tokens` (L, E) ask for each expert: what it found in slots, and
        what was on its way."""
        machine, demanded = self._machine, tokens > 0
        self.computed[:] = False
        self.pump()
        self._begun()
        scores, landing = self._room()[0], self._landing()
        hits, late = np.zeros_like(demanded), np.zeros_like(demanded)
        for layer in range(machine.num_layers):
            self.advance(machine.layer_s)
            asked = demanded[layer]
            here, running = self._here[layer], self._running[layer]
            hits[layer], late[layer] = asked & here & ~running, asked & here & running
            missing = (asked & ~here).nonzero()[0]
            began = self.now
            entering = self._bring(layer, missing.tolist(), tokens[layer]) if len(missing) else []
            self.stall_s += self.now - began
            read = int((asked & ~self.computed[layer]).sum())
            rest = machine.expert_s * read - (self.now - began)
            self._wait_for(layer, late[layer])
            self.advance(max(0.0, rest))
            self._keep(layer, entering, asked, scores[layer], landing[layer])
        self._passed(demanded)
        self._close(demanded)
        return hits, late

    def _begun(self) -> None:
        """A window's pass is, and what is to be copied for it is under way."""

    def _bring(self, layer: int, missing: list[int], tokens: NDArray[np.int64]) -> list[int]:
        """Get what a layer misses computed; those of it that come into slots if there is room."""
        self._read_over_link(len(missing) * self._machine.copy_s)
        self.copies += len(missing)
        return missing

    def _kept(self, layer: int, expert: int, victim: int | None) -> None:
        """An expert entered a slot: a free one, or that of `victim`."""

    def _passed(self, demanded: NDArray[np.bool_]) -> None:
        """A window's pass is over."""

    def _landing(self) -> list[int]:
        """Free slots that each layer may fill."""
        num_layers = self._machine.num_layers
        if not self.free:
            return [0] * num_layers
        layers, _ = dealt(self._here.sum(axis=1), self.free)
        counts: list[int] = np.bincount(layers, minlength=num_layers).tolist()
        return counts

    def _keep(
        self,
        layer: int,
        entering: list[int],
        asked: NDArray[np.bool_],
        scores: NDArray[np.float32],
        landing: int,
    ) -> None:
        """Free slots first, then those of the layer's experts that nobody asked for, the lowest score
        first."""
        replaceable = np.where(asked | self._running[layer], np.float32(np.inf), scores)
        for number, expert in enumerate(entering):
            victim = None
            if number < landing:
                self.free -= 1
            else:
                victim = int(replaceable.argmin())
                if not np.isfinite(replaceable[victim]):
                    return
                replaceable[victim] = np.inf
                self._evict(ExpertKey(layer, victim))
            self._here[layer, expert] = True
            self._kept(layer, expert, victim)

    def _close(self, demanded: NDArray[np.bool_]) -> None:
        self._passes += 1
        self._last_use[demanded] = self._passes
        self._unused[demanded] = self._guarded[demanded] = False

    def stream(self, tokens: NDArray[np.int64]) -> None:
        """A prompt's pass, of which so many ask for each expert: these go past the slots, and stay where a
        layer has free ones."""
        demanded = tokens > 0
        self.advance(float((demanded & ~self._here).sum()) * self._machine.copy_s)
        share = -(-self._machine.num_slots // self._machine.num_layers)
        for layer, expert in np.argwhere(demanded & ~self._here).tolist():
            self.copies += 1
            if self.free and int(self._here[layer].sum()) < share:
                self.free -= 1
                self._here[layer, expert] = True
        self._close(demanded)
