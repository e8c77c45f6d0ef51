"""Copies between a GPU and RAM that is not pinned, by way of a little that is: the driver's own way fills
fresh memory with one thread. Knows nothing of what is copied."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_PINNED_BYTES = 16 << 20  # twice: one half is on its way while the host reads or writes the other

Pair = tuple[Tensor, Tensor]  # what is copied, and where to


def copy_all(pairs: Iterable[Pair]) -> None:
    """Each first tensor into the second one, which is like it but for its device; contiguous both. Comes back
    when all is there."""
    found = list(pairs)
    device = next((part.device for pair in found for part in pair if part.is_cuda), None)
    if device is None:
        for source, target in found:
            target.copy_(source)
        return
    halves = [_Half(device), _Half(device)]
    for number, batch in enumerate(_batches(found)):
        halves[number % 2].carry(batch)
    for half in halves:
        half.finish()


class _Half:
    """A piece of pinned memory, and what it holds."""

    def __init__(self, device: torch.device) -> None:
        self._memory = _pinned(_PINNED_BYTES)
        self._stream, self._event = torch.cuda.current_stream(device), torch.cuda.Event()
        self._arriving: list[Pair] = []

    def carry(self, batch: Sequence[Pair]) -> None:
        """Start it, once what was carried before is where it belongs."""
        self.finish()
        at = 0
        for source, target in batch:
            pinned = self._memory[at : at + len(source)]
            at += len(source)
            pinned.copy_(source, non_blocking=True)
            if target.is_cuda:
                target.copy_(pinned, non_blocking=True)
            else:
                self._arriving.append((pinned, target))
        self._event.record(self._stream)

    def finish(self) -> None:
        """Wait for it."""
        self._event.synchronize()
        for pinned, target in self._arriving:
            target.copy_(pinned)
        self._arriving.clear()


def _pinned(num_bytes: int) -> Tensor:
    """So many bytes; not pinned where no more can be: experts may come close to the limit."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # each release of PyTorch has its own kind of it
        _LOG.warning("texts are copied through %d bytes that stay unpinned: %s", num_bytes, error)
        return torch.empty(num_bytes, dtype=torch.uint8)


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """As bytes, as many as fit into a half each."""
    batch: list[Pair] = []
    room = _PINNED_BYTES
    for source, target in pairs:
        assert source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
        source, target = (part.view(-1).view(torch.uint8) for part in (source, target))
        while len(source):
            batch.append((source[:room], target[:room]))
            source, target = source[room:], target[room:]
            room -= len(batch[-1][0])
            if not room:
                yield batch
                batch, room = [], _PINNED_BYTES
    if batch:
        yield batch
