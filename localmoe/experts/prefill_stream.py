"""A prompt's experts, streamed through the slots layer by layer, each over the link at most once a pass.

A long prompt asks for nearly every expert, and the order of layers is known, so the copies run ahead of the
computation without waiting for the router. Experts that a layer has free slots for stay; the others pass
through a small ring of slots, each of which is overwritten once its reader has been issued. The longer a pass
is the fewer there are, so what experts compute in a long one lies in slots, too. Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.transfers import Mark

RING_SLOTS = 32


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts of one layer that can be computed with together, the addresses of their weights, and the slots
    that these are copied to first; none where all are here."""

    experts: list[int]
    addresses: list[int]
    slots: list[int]


class PrefillStream:
    """One pass over all layers: `plan` and `bring` of each in turn; `close` at the end.

    Attributes:
        lent: uint8, memory of slots for what experts compute; None: none was asked for.
    """

    def __init__(self, memory: DeviceExpertMemory, lent_bytes: int = 0) -> None:
        """lent_bytes: of `lent`, at least; slots enough have to be there."""
        self._memory = memory
        memory.transfers.copies_wait_for(memory.transfers.mark_compute())  # slots may still be read
        memory.transfers.compute_waits_for_copies()  # of earlier prefetches
        lent = -(-lent_bytes // memory.slots.slot_bytes) if lent_bytes else 0
        self._lent = memory.reserve_neighbours(lent) if lent else range(0)
        self.lent = memory.slots.lend(self._lent.start, lent) if lent else None
        slots = memory.slots.num_slots - lent
        self._ring = memory.reserve(min(RING_SLOTS, max(2, slots // 4))) if memory.may_copy else []
        self._share = (slots - len(self._ring)) // memory.store.num_layers
        self._owner: dict[int, ExpertKey] = {}  # of ring slots
        self._read: dict[int, Mark] = {}  # ring slot -> when its last reader was issued
        self._next = 0
        self._staying: list[int] = []  # slots of the layer at hand that are not in the ring, nor filled yet

    def plan(self, layer: int) -> list[ExpertGroup]:
        """Groups that together hold all experts of a layer: first those that are here."""
        memory = self._memory
        here, missing = memory.split_layer(layer)
        groups = []
        if here:
            groups.append(ExpertGroup(here, [memory.slot_address(ExpertKey(layer, e)) for e in here], []))
        self._staying += memory.take_free(layer, self._share, len(missing))
        slots = list(self._staying)
        while len(slots) < len(missing):
            slots.append(self._ring[self._next])
            self._next = (self._next + 1) % len(self._ring)
        size = max(1, len(self._ring) // 2)
        for start in range(0, len(missing), size):
            taken = slots[start : start + size]
            addresses = [memory.slots.address(slot) for slot in taken]
            groups.append(ExpertGroup(missing[start : start + size], addresses, taken))
        return groups

    def bring(self, layer: int, groups: list[ExpertGroup]) -> Iterator[ExpertGroup]:
        """The groups of a layer's plan, each once it is here: compute with it before asking for the next."""
        for group in groups:
            if group.slots:
                self._copy(layer, group)
                self._memory.transfers.compute_waits_for_copies()
            yield group
            self._mark_readers(layer, group.experts)

    def _copy(self, layer: int, group: ExpertGroup) -> None:
        memory, keys = self._memory, [ExpertKey(layer, expert) for expert in group.experts]
        readers: dict[int, Mark] = {}
        for key, slot in zip(keys, group.slots, strict=True):
            if self._staying:  # these come first
                self._staying.remove(slot)
                continue
            if slot in self._owner:
                memory.leave(self._owner[slot])
            self._owner[slot] = key
            if slot in self._read:
                mark = self._read.pop(slot)
                readers[id(mark)] = mark
        for mark in readers.values():
            memory.transfers.copies_wait_for(mark)
        memory.load_all(keys, group.slots)

    def _mark_readers(self, layer: int, experts: list[int]) -> None:
        keys = {ExpertKey(layer, expert) for expert in experts}
        slots = [slot for slot, key in self._owner.items() if key in keys]
        if slots:
            mark = self._memory.transfers.mark_compute()
            self._read.update(dict.fromkeys(slots, mark))

    def close(self) -> None:
        """What was lent is free again, and so are the ring's slots, but for what a layer may hold by its
        share: most of them are the last layer's, and passes to come deal free ones to the layers that have
        fewest."""
        memory, self.lent = self._memory, None
        memory.give_back([*self._lent, *self._staying])
        share = -(-memory.slots.num_slots // memory.store.num_layers)
        for slot, key in list(self._owner.items()):
            # of what could not be copied the memory has the slot already
            if memory.residency()[key] and memory.held()[key.layer] > share:
                memory.leave(key)
                del self._owner[slot]
        memory.give_back([slot for slot in self._ring if slot not in self._owner])


class DryStream:
    """Stands in for a stream where only the launches matter: one expert a layer, in the host's memory."""

    lent: Tensor | None = None

    def __init__(self, memory: DeviceExpertMemory) -> None:
        self._memory = memory

    def plan(self, layer: int) -> list[ExpertGroup]:
        """The layer's first expert."""
        return [ExpertGroup([0], [self._memory.store.device_address(ExpertKey(layer, 0))], [])]

    def bring(self, layer: int, groups: list[ExpertGroup]) -> Iterator[ExpertGroup]:
        """The same."""
        return iter(groups)

    def close(self) -> None:
        """Nothing was taken."""
