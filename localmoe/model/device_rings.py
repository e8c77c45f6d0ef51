"""Keys and values of layers that see a window: each has a ring of positions, in which new ones overwrite
what no row sees any more. Says to which positions a text can go back, and keeps the end of the last prompt
aside in host RAM once an answer overwrites it, for another answer to it or a next turn without its thoughts.
Launches nothing.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK
from localmoe.kernels.gpu.attention import CHUNK, SECTION
from localmoe.model.device_window import Unrolled
from localmoe.model.sequence_copy import from_host, to_host

if TYPE_CHECKING:
    from localmoe.model.device_cache import DeviceKVLayer

_LOG = logging.getLogger(__name__)
_SECTION = SECTION * CHUNK  # positions, at multiples of which sums of attention begin anew


class RingsCopy(NamedTuple):
    """What rings know of their text beside what is in them; see SlidingRings.forget."""

    written: int
    mark: int | None
    aside_written: int
    aside_end: int


class SlidingRings:
    """The rings of one cache, all of which are written alike."""

    def __init__(self, layers: Sequence[DeviceKVLayer], windows: Sequence[int]) -> None:
        """windows: positions that a row of each layer sees, its own among them."""
        self._layers = layers
        self._sizes = [(layer.capacity, window) for layer, window in zip(layers, windows, strict=True)]
        self._memory: Tensor | None = None  # bytes on the host
        self.forget()

    def forget(self) -> None:
        """No text is there."""
        self._written = 0  # end of all that was ever written, of rejected and padding rows too
        self._mark: int | None = None
        self._aside_written, self._aside_end = 0, 0  # of what is kept aside; nothing is: 0

    def make_room(self) -> None:
        """Room to keep something aside: before answers, which would wait for it."""
        parts = list(self._parts())
        if parts and self._memory is None:
            self._memory = _host_memory(sum(part.nbytes for part in parts), pinned=parts[0].is_cuda)

    def release(self) -> None:
        """Give the memory back."""
        self.forget()
        self._memory = None

    # -- what passes write

    def mark(self, position: int) -> None:
        """Somebody may want to go back to this position later, whatever is written behind it."""
        self._mark = position or None  # to the beginning one can always go

    def expect(self, start: int, end: int) -> None:
        """A pass is issued next, at `start`, that writes positions before `end`."""
        if self._mark is not None and not self._intact(self._mark, end):
            if self._intact(self._mark, self._written):
                self._put_aside(start)
            self._mark = None
        self._written = max(self._written, end)

    def unroll(self, start: int, count: int, device: torch.device) -> Unrolled | None:
        """For a prompt's pass, of so many rows; None where rings have room for it."""
        if count <= DEVICE_PREFILL_CHUNK or not self._sizes:
            return None
        ((capacity, window),) = set(self._sizes)
        base = max(0, start - window + 1) // _SECTION * _SECTION
        assert start - base <= capacity, f"a ring of {capacity} for a window of {window}"
        kept = min(count, capacity)
        start_at, kept_at = (
            torch.full((1,), place, dtype=torch.int64, device=device)
            for place in (start - base, start + count - kept)
        )
        return Unrolled(base, start - base, start_at, count, kept, kept_at)

    # -- going back

    def keepable(self, length: int, copied: RingsCopy | None = None) -> int:
        """So many of the first `length` tokens of the text can be kept; of a copy's text, if one is given."""
        now = RingsCopy(self._written, self._mark, self._aside_written, self._aside_end)
        place = now if copied is None else copied
        if self._intact(length, place.written):
            return length
        length = min(length, place.aside_end)
        return length if self._intact(length, place.aside_written) else 0

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, as many as can be kept."""
        if not length:
            self.forget()
            return
        if not self._intact(length, self._written):
            assert self.keepable(length) == length, f"{length} tokens cannot be kept"
            for part, kept in self._aside():
                part.copy_(kept, non_blocking=True)
            self._written = self._aside_written
        self._aside_end = min(self._aside_end, length)  # behind it another text may follow
        if self._mark is not None and self._mark > length:
            self._mark = None

    def _intact(self, length: int, written: int) -> bool:
        """Whether all that a row at position `length` sees is in the rings, once others have been written."""
        return all(
            written <= capacity or length >= written - capacity + window for capacity, window in self._sizes
        )

    # -- copies of all of it

    @property
    def copy_bytes(self) -> int:
        """Of a copy."""
        return sum(part.nbytes for part in self._parts()) * (2 if self._aside_end else 1)

    def copy_out(self, parts: list[Tensor]) -> RingsCopy:
        """Add what is in the rings, and kept aside, to `parts` in host RAM."""
        parts += to_host(self._parts())  # in stream order, and waited for
        if self._aside_end:
            parts += [kept.clone() for _, kept in self._aside()]
        return RingsCopy(self._written, self._mark, self._aside_written, self._aside_end)

    @torch.inference_mode()
    def bring_back(self, copied: RingsCopy, parts: Iterator[Tensor]) -> None:
        """Take from `parts` what a copy added."""
        own = list(self._parts())
        from_host(itertools.islice(parts, len(own)), own)
        self._written, self._mark, self._aside_written, self._aside_end = copied
        if self._aside_end:
            self.make_room()
            for part, kept in self._aside():
                if part.is_cuda:  # what is kept aside may still be on its way to the rings
                    torch.cuda.current_stream(part.device).synchronize()
                kept.copy_(next(parts))

    # -- what is kept aside

    @torch.inference_mode()
    def _put_aside(self, end: int) -> None:
        """The rings as they are in stream order, of a text that ends there."""
        self.make_room()
        for part, kept in self._aside():
            kept.copy_(part, non_blocking=True)
        self._aside_written, self._aside_end = self._written, end

    def _aside(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of the rings, and where it is kept."""
        assert self._memory is not None, "nothing was kept"
        at = 0
        for part in self._parts():
            yield part, self._memory[at : at + part.nbytes].view(part.dtype).view(part.shape)
            at += part.nbytes

    def _parts(self) -> Iterator[Tensor]:
        for layer in self._layers:
            if layer.is_initialized:  # some read what another layer wrote
                yield from (layer.keys, layer.values)


def _host_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """So many bytes; pinned memory of PyTorch's own would be rounded up to a power of two."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if pinned:
        runtime, pointer = torch.cuda.cudart(), memory.data_ptr()
        code = int(runtime.cudaHostRegister(pointer, num_bytes, 0))
        if code:
            _LOG.warning("%d bytes beside the experts stay unpinned (error %d)", num_bytes, code)
        else:
            weakref.finalize(memory, runtime.cudaHostUnregister, pointer).atexit = False
    return memory
