"""Closes the holes that loading leaves in PyTorch's allocator. Decides nothing about what is where.

The allocator takes blocks of 20 MiB from the driver for tensors below 10 MiB, and whole numbers of 2 MiB for
larger ones; what is freed beside a tensor that stays can hold no larger tensor, nor be given back. Of a model
of many middle-sized tensors, some of which were joined, that is hundreds of MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

_BLOCK_BYTES = 128 << 20  # that are had twice for a moment
_LARGE_BYTES = 64 << 20  # from here on a tensor has a block of its own, which is hardly larger
_ALIGNMENT = 512  # as the allocator's own

_Group = list[Tensor]  # of one storage


def compact(tensors: Iterable[Tensor]) -> None:
    """Move tensors to where they leave no holes, and give the rest back to the driver. Before anything
    remembers their addresses. Views move with the tensor that they are views of, and must be given with it,
    else its memory is had twice. Tensors on a CPU stay where they are."""
    move_together([tensor for tensor in tensors if tensor.is_cuda], torch.cuda.empty_cache)


@torch.no_grad()
def move_together(tensors: Sequence[Tensor], give_back: Callable[[], None]) -> None:
    """Move those that are not large into blocks of their own. give_back: what was freed; called behind each
    block."""
    if not tensors:
        return
    give_back()
    for block in _blocks(_by_storage(tensors)):
        _move(block)
        give_back()


def _by_storage(tensors: Sequence[Tensor]) -> list[_Group]:
    """Those that are not large, nor parts of something that is not given."""
    groups: dict[int, _Group] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        storage = tensor.untyped_storage()
        if 0 < storage.nbytes() < _LARGE_BYTES:
            groups.setdefault(storage.data_ptr(), []).append(tensor)
    return [group for group in groups.values() if max(part.nbytes for part in group) == _bytes(group)]


def _blocks(groups: list[_Group]) -> Iterator[list[_Group]]:
    """As many of them as a block holds."""
    block: list[_Group] = []
    for group in groups:
        if block and sum(map(_room, block)) + _room(group) > _BLOCK_BYTES:
            yield block
            block = []
        block.append(group)
    if block:
        yield block


def _bytes(group: _Group) -> int:
    return group[0].untyped_storage().nbytes()


def _room(group: _Group) -> int:
    return -(-_bytes(group) // _ALIGNMENT) * _ALIGNMENT


def _move(block: list[_Group]) -> None:
    """Into one allocation."""
    device = block[0][0].device
    room, begin = torch.empty(sum(map(_room, block)), dtype=torch.uint8, device=device), 0
    for group in block:
        end = begin + _room(group)
        old = group[0].untyped_storage()
        room[begin : begin + old.nbytes()].copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(old))
        for tensor in group:
            place = begin // tensor.element_size() + tensor.storage_offset()
            moved = torch.empty(0, dtype=tensor.dtype, device=device)
            tensor.data = moved.set_(room.untyped_storage(), place, tensor.shape, tensor.stride())
        begin = end
