"""Copies of what a sequence's state holds, in host RAM: for a text that is left and may be gone back to.
Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localmoe.model.staged_copies import copy_all


@dataclass(frozen=True, slots=True)
class SequenceCopy:
    """Of one state at one time.

    Attributes:
        length: tokens that it held.
        parts: its tensors on the host, in an order that the state knows.
        facts: what it needs to know besides.
        keepable: as the state's own (model.runner.SequenceState), had the copy been brought back.
    """

    length: int
    parts: tuple[Tensor, ...]
    facts: Any
    keepable: Callable[[int], int]

    @property
    def num_bytes(self) -> int:
        """Of host RAM."""
        return sum(part.nbytes for part in self.parts)


def lacks_memory(error: Exception) -> bool:
    """Whether the host had no memory for a copy: PyTorch says so in a plain RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def to_host(parts: Iterable[Tensor], length: int | None = None) -> list[Tensor]:
    """Copies of tensors; of keys or values (1, heads, capacity, dim) the first positions, where a length is
    given."""
    found, pairs = [], []
    for part in parts:
        if length is None:
            found.append(torch.empty_like(part, device="cpu"))
            pairs.append((part, found[-1]))
        else:
            _, heads, _, dim = part.shape
            found.append(torch.empty(1, heads, length, dim, dtype=part.dtype))
            pairs += [(part[0, head, :length], found[-1][0, head]) for head in range(heads)]
    copy_all(pairs)
    return found


def from_host(kept: Iterable[Tensor], parts: Iterable[Tensor], *, cut: bool = False) -> None:
    """The other way. cut: a copy has fewer positions."""
    pairs = []
    for copied, part in zip(kept, parts, strict=True):
        if cut:
            heads, length = copied.shape[1:3]
            pairs += [(copied[0, head], part[0, head, :length]) for head in range(heads)]
        else:
            pairs.append((copied, part))
    copy_all(pairs)


@dataclass(frozen=True, slots=True)
class _Moved:
    """In the place of a tensor: which of a copy's parts it is, and where it was."""

    part: int
    device: torch.device


def take_apart(value: Any, parts: list[Tensor]) -> Any:
    """A tensor, or lists and mappings of such: what it was made of, with copies of the tensors in `parts`."""
    if isinstance(value, Tensor):
        parts.append(value.detach().to("cpu", copy=True))
        return _Moved(len(parts) - 1, value.device)
    return _changed(value, lambda inner: take_apart(inner, parts))


def put_together(value: Any, parts: Sequence[Tensor]) -> Any:
    """What was taken apart, with tensors of its own again."""
    if isinstance(value, _Moved):
        return parts[value.part].to(value.device, copy=True)
    return _changed(value, lambda inner: put_together(inner, parts))


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(change(inner) for inner in value)
    if not isinstance(value, Mapping):
        return value
    made: Any = copy(value)
    for key, inner in value.items():
        made[key] = change(inner)
    return made
