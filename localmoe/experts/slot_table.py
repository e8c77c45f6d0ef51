"""Who is in which slot of the device, and who makes room: the host's side of the residency table where whole
passes run on the GPU. Copies nothing and uploads nothing. WHICH expert goes is the policy's, through its
scores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.counters import TransferCounters
from localmoe.experts.record_store import RecordStore
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.victims import worst_key

Scores = Callable[[NDArray[np.int64]], tuple[NDArray[np.float32], bool]]
FREE = -1


class SlotTable:
    """Slots and experts of one model. A slot is in the table, free, or reserved."""

    def __init__(self, store: RecordStore, slots: DeviceSlots, scores: Scores) -> None:
        """scores: last use (L, E) -> scores (L, E) and whether room is made within a layer only (the policy's
        keep_scores)."""
        self.store = store
        self.slots = slots
        self._scores = scores
        shape = (store.num_layers, store.num_experts)
        self._slot_address = np.array([slots.address(i) for i in range(slots.num_slots)], dtype=np.int64)
        self._slot_of = np.full(shape, FREE, dtype=np.int64)
        self._ticket = np.zeros(shape, dtype=np.int64)
        self._unused = np.zeros(shape, dtype=np.bool_)  # prefetched and not asked for since
        self._guarded = np.zeros(shape, dtype=np.bool_)  # the same, prefetched for the window at hand
        self._last_use = np.zeros(shape, dtype=np.int64)
        self._free = list(range(slots.num_slots - 1, -1, -1))
        self._stale = True  # the table on the device is not what it should be
        self._passes = self._open_passes = 0
        self._counters = TransferCounters()

    def resident_keys(self) -> list[ExpertKey]:
        """Experts in slots, or on their way there."""
        return [ExpertKey(*pair) for pair in np.argwhere(self._slot_of != FREE).tolist()]

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in a slot, or on its way there."""
        return np.not_equal(self._slot_of, FREE)

    @property
    def missing(self) -> int:
        """Experts, of all layers, that are in no slot."""
        return int((self._slot_of == FREE).sum())

    @property
    def may_copy(self) -> bool:
        """Whether any expert is not in a slot."""
        return bool((self._slot_of == FREE).any())

    def _room(self) -> tuple[NDArray[np.float32], bool]:
        """Scores of what may be evicted (infinite for the rest), and whether room is made within a layer."""
        scores, per_layer = self._scores(self._last_use)
        scores = scores.copy()
        scores[(self._slot_of == FREE) | self._guarded] = np.inf
        return scores, per_layer

    def _take_slot(self, key: ExpertKey, scores: NDArray[np.float32], per_layer: bool) -> int | None:
        """A free slot, or that of the expert with the lowest score, which leaves; None: there is none."""
        if self._free:
            return self._free.pop()
        victim = worst_key(scores, key.layer if per_layer else None)
        if victim is None:
            return None
        scores[victim] = np.inf
        return self.leave(victim)

    def leave(self, key: ExpertKey) -> int:
        """An expert goes, and the caller has its slot."""
        slot = int(self._slot_of[key])
        self._slot_of[key] = FREE
        self._stale = True
        self._counters.wasted += bool(self._unused[key])
        self._unused[key] = self._guarded[key] = False
        return slot

    def begin_answer(self) -> None:
        """What was prefetched for the answer before is no waste of the next one."""
        self._unused[:] = False

    # -- a prompt, streamed layer by layer (see prefill_stream)

    def split_layer(self, layer: int) -> tuple[list[int], list[int]]:
        """A layer's experts that are here or on their way, and those that are not."""
        here = self._slot_of[layer] != FREE
        return np.flatnonzero(here).tolist(), np.flatnonzero(~here).tolist()

    def slot_address(self, key: ExpertKey) -> int:
        """Device address of a resident expert."""
        return int(self._slot_address[self._slot_of[key]])

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def at_hand(self) -> NDArray[np.bool_]:
        """(L, E): what can be copied into a slot at once."""
        return np.ones_like(self._unused)

    def likely(self) -> NDArray[np.float64]:
        """(L, E): the higher, the sooner it is asked for again."""
        return self._last_use.astype(np.float64)

    def filled(self) -> bool:
        """Free slots were filled while nobody asks; whether more will be at hand for others soon."""
        return False

    def reserve(self, count: int) -> list[int]:
        """`count` slots, or as many as there are: free ones, then of the layers that hold most those of the
        lowest scores, which leave; at last even those that the policy wants to keep. The caller fills or
        returns them."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        layers, experts = np.nonzero(self._slot_of != FREE)
        scores = self._room()[0][layers, experts]
        order = np.lexsort((scores, layers))
        layers, experts, scores = layers[order], experts[order], scores[order]
        gone = np.arange(len(layers)) - np.searchsorted(layers, layers)  # of the layer, before this one goes
        order = np.lexsort((scores, gone - self.held()[layers], np.isinf(scores)))[: count - len(taken)]
        for pair in zip(layers[order].tolist(), experts[order].tolist(), strict=True):
            taken.append(self.leave(ExpertKey(*pair)))
        return taken

    def reserve_neighbours(self, count: int) -> range:
        """`count` slots beside each other, those that are worth least together; who is in them leaves. The
        caller returns them."""
        worth = np.full(self.slots.num_slots, np.inf)
        worth[self._free] = 0
        layers, experts = np.nonzero(self._slot_of != FREE)
        scores = self._room()[0][layers, experts]
        worth[self._slot_of[layers, experts]] = 1 + scores.argsort().argsort()
        sums = np.convolve(worth, np.ones(count), "valid")
        first = int(sums.argmin())
        assert np.isfinite(sums[first]), f"no {count} slots beside each other"
        run = range(first, first + count)
        at = self._slot_of[layers, experts]
        leaving = (at >= run.start) & (at < run.stop)
        for pair in zip(layers[leaving].tolist(), experts[leaving].tolist(), strict=True):
            self.leave(ExpertKey(*pair))
        self._free = [slot for slot in self._free if slot not in run]
        return run

    def take_free(self, layer: int, share: int, count: int) -> list[int]:
        """Free slots, up to `count`, as far as the layer holds fewer than `share`; for the caller to fill or
        return."""
        held = int(np.count_nonzero(self._slot_of[layer] != FREE))
        return [self._free.pop() for _ in range(min(count, len(self._free), max(0, share - held)))]

    def held(self) -> NDArray[np.int64]:
        """(L,): slots of each layer."""
        held: NDArray[np.int64] = np.count_nonzero(self._slot_of != FREE, axis=1)
        return held

    def give_back(self, slots: list[int]) -> None:
        """Slots that hold nothing."""
        self._free.extend(slots)

    def note_use(self, demanded: NDArray[np.bool_]) -> None:
        """A pass used these experts, (L, E)."""
        self._passes += 1
        self._last_use[demanded] = self._passes
        self._unused[demanded] = self._guarded[demanded] = False
