"""All routed experts on the disk, in one file, and those that were asked for of late in RAM, where they are
computed with or copied from (disk_reads brings them there).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.errors import HardwareError
from localmoe.core.types import ExpertKey
from localmoe.core.uninterrupted import uninterrupted
from localmoe.experts.disk_reads import ExpertReads
from localmoe.experts.ram_arena import RamArena
from localmoe.experts.ram_places import NOWHERE
from localmoe.experts.ram_reach import RamReach
from localmoe.experts.record_file import RecordFile
from localmoe.experts.record_store import RecordStore


class DiskStore(ExpertReads, RecordStore):
    """Records in a file, `ram_experts` of them in RAM at a time. Thread-safe; close() ends the reads."""

    def __init__(
        self, file: RecordFile, ram_experts: int, embedding: Tensor | None = None, *, keep: bool = True
    ) -> None:
        """file: whole. ram_experts: as many as a layer has, at least. keep: the file, beyond `close`."""
        RecordStore.__init__(self, file.layouts, file.num_experts, file.dtype)
        stride = max(file.stride(layer) for layer in range(self.num_layers))
        ExpertReads.__init__(self, file, RamArena(ram_experts, stride, embedding))
        self.embedding, self._keep = embedding, keep

    @property
    def num_bytes(self) -> int:
        """Bytes of RAM reserved."""
        return self._arena.num_bytes

    def record(self, key: ExpertKey) -> Tensor:
        """A copy of one, read if need be. Raises as `held`."""
        with self.lending(key) as place:
            return place.clone()

    @contextmanager
    def lending(self, key: ExpertKey) -> Iterator[Tensor]:
        """As RecordStore's, read if need be. Raises as `held`."""
        with self.held(key.layer, [key.expert], counts=False) as (_, groups):
            for _ in groups:
                pass
            with self.lock:
                self._raise_if_lost([])
                place = self.lent(key)
            yield place

    @property
    def some_record(self) -> Tensor:
        """Words of any, to time copies by."""
        return self._words(0, 0)

    def lend(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Those of them that are in RAM, which stay there until they are taken back."""
        with self.lock, uninterrupted():
            here = [key for key in keys if self.addresses[key]]
            for key in here:
                self._places.held[key] += 1
        return here

    def lent(self, key: ExpertKey) -> Tensor:
        """Words of one that somebody holds."""
        assert self.addresses[key] and self._places.held[key], "it may give way any moment"
        return self._words(int(self._places.place[key]), key.layer)

    def _words(self, place: int, layer: int) -> Tensor:
        layout = self.layouts[layer]
        return self._arena.place(place, layout.num_bytes(self.dtype)).view(layout.word(self.dtype))

    def take_back(self, keys: Sequence[ExpertKey]) -> None:
        """What was lent."""
        with self.lock, uninterrupted():
            for key in keys:
                self._places.held[key] -= 1
            self.lock.notify_all()

    def note_demand(self, layer: int, experts: Sequence[int]) -> None:
        """As RecordStore's, of what is not asked for by `held`."""
        with self.lock:
            self._places.note_demand(layer, experts)

    def note_pass(self, demanded: NDArray[np.bool_]) -> None:
        """A pass asked for these, (L, E)."""
        with self.lock:
            self._places.note_pass(demanded)

    def note_tokens(self, layer: int, chosen: NDArray[np.int32]) -> None:
        """See RamPlaces."""
        with self.lock:
            self._places.note_tokens(layer, chosen)

    def in_slots(self, here: NDArray[np.bool_]) -> None:
        """These, (L, E), are in a GPU's memory too, and the first that RAM can do without."""
        with self.lock:
            self._places.elsewhere = here

    def worth(self) -> NDArray[np.float64]:
        """(L, E), see RamPlaces."""
        with self.lock:
            return self._places.worth()

    def may_leave(self, in_slots: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(L, E): of those that are in slots, see worth_a_slot."""
        with self.lock:
            return self._places.may_leave(in_slots)

    def prepare_reach(self, in_slots: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(L, E): where kernels of the pass that is opened next may read experts in RAM, 0 for others. They
        stay there until that pass was closed, or another one is prepared for."""
        with self.lock, uninterrupted():
            may_be = (self.addresses != 0) & ~in_slots
            found = self._places.reach.prepare(self._places.worth(), may_be)
            return np.where(found, self.addresses + self._arena.shift, 0)

    @contextmanager
    def reach(self) -> Iterator[RamReach]:
        """To say that a pass was opened, closed or withdrawn, which may let others give way."""
        with self.lock:
            yield self._places.reach
            self.lock.notify_all()

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in RAM, or on its way there."""
        found: NDArray[np.bool_] = self._places.place != NOWHERE
        return found

    def forget(self) -> None:
        """What is in RAM, and who asked for it."""
        with self.lock, uninterrupted():
            for key in self._places.forget():
                self.addresses[key] = 0

    def device_address(self, key: ExpertKey) -> int:
        """Of zeros. Kernels read no record there, but where the CPU did not answer, in a pass that is worth
        nothing; where they may read some, `prepare_reach` says."""
        return self._arena.nothing_address

    @property
    def embedding_address(self) -> int:
        """Where kernels find the embedding's table."""
        return self._arena.embedding_address

    def pin(self) -> None:
        """Register the RAM that holds experts, and the embedding."""
        try:
            self._arena.pin()
        except HardwareError:
            self.close()
            raise

    def close(self) -> None:
        """End the reads, and let go of the RAM. A second call does nothing."""
        self.end()
        self._arena.release()
        self.embedding = None
        if not self._keep:
            self.file.path.unlink(missing_ok=True)
            self._keep = True  # what comes to lie there later is another's
