"""All expert records of a model in one file on the disk, in the form in which they are computed with: made
once, beside the model's drafts. Reads no record and keeps none; see disk_reader, disk_store.

The file is [head | layer 0 | layer 1 | ...], each layer its records one after another, in whole pages.
It is written under another name and renamed once it is whole; the head says of which weights it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch

from localmoe.core.errors import DiskError
from localmoe.core.units import format_bytes
from localmoe.core.whole_file import sync_folder
from localmoe.experts.records import PAGE_BYTES, RecordLayout, record_stride
from localmoe.hub.unfinished_records import remove_leftovers, unfinished_name

_FORMAT = "localmoe expert records 1"
_ALIGNED = 1 << 16  # where the head ends and layers begin: what systems map a file by
_SYNCED_BYTES = 256 << 20  # at a time, so that one may stop between
_SPARE_BYTES = 256 << 20  # that stay free on the disk
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


@dataclass(frozen=True)
class RecordFile:
    """Where it lies or will lie, and what is in it.

    Attributes:
        layouts: one a MoE layer. dtype: of weights in plain form.
        origin: tells the weights that it is made of from others.
    """

    path: Path
    layouts: tuple[RecordLayout, ...]
    num_experts: int
    dtype: torch.dtype
    origin: str

    @classmethod
    def in_folder(
        cls, folder: Path, layouts: Sequence[RecordLayout], num_experts: int, dtype: torch.dtype, origin: str
    ) -> RecordFile:
        """Of records of that form; others of the same model may lie beside it."""
        return cls(folder / _name(layouts, dtype), tuple(layouts), num_experts, dtype, origin)

    @classmethod
    def for_one_load(
        cls, folder: Path, layouts: Sequence[RecordLayout], num_experts: int, dtype: torch.dtype
    ) -> RecordFile:
        """Named as what is unfinished, so that it is removed as such where its process could not."""
        path = folder / unfinished_name(_name(layouts, dtype))
        return cls(path, tuple(layouts), num_experts, dtype, "this load's")

    def stride(self, layer: int) -> int:
        """Bytes from one record of the layer to the next."""
        return self._strides[layer]

    def offset(self, layer: int, expert: int) -> int:
        """Of a record."""
        return self._begins[layer] + expert * self._strides[layer]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self._begins[-1]

    @cached_property  # as are the places: each read asks
    def _strides(self) -> list[int]:
        return [record_stride(layout, self.dtype) for layout in self.layouts]

    @cached_property
    def _begins(self) -> list[int]:
        """Of each layer, and the end."""
        each = (-(-stride * self.num_experts // _ALIGNED) * _ALIGNED for stride in self._strides)
        return list(accumulate(each, initial=_ALIGNED))

    @property
    def head(self) -> bytes:
        """Its first bytes."""
        records = [(self.stride(layer), str(layout)) for layer, layout in enumerate(self.layouts)]
        values = {
            "format": _FORMAT,
            "origin": self.origin,
            "experts": self.num_experts,
            "records": hashlib.sha256(repr((str(self.dtype), records)).encode()).hexdigest(),
        }
        return json.dumps(values).encode().ljust(PAGE_BYTES)

    def is_whole(self) -> bool:
        """Whether it is there, of these weights and in this form."""
        try:
            with self.path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                return size == self.num_bytes and stream.read(PAGE_BYTES) == self.head
        except OSError:
            return False

    def check_room(self) -> None:
        """Raises DiskError: the disk is too small for it."""
        parents = (self.path.parent, *self.path.parent.parents)
        folder = next((place for place in parents if os.path.exists(place)), Path("."))
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
            if self.num_bytes + _SPARE_BYTES > free:
                raise DiskError(
                    f"The experts' file takes {format_bytes(self.num_bytes)}, and the disk with {folder} has "
                    f"{format_bytes(free)} free: make room, or set LOCALMOE_HOME to a folder on another disk."
                )

    def _make_room(self) -> None:
        """Where it lacks, at the cost of what lies in its place and is damaged, or of another version. Raises
        as check_room."""
        try:
            self.check_room()
        except DiskError:
            if self.is_whole():
                raise
            with suppress(OSError):
                self.path.unlink()
            self.check_room()

    @contextmanager
    def written(self, told: Callable[[int], None]) -> Iterator[Callable[[int], mmap.mmap]]:
        """Inside, memory for each layer in turn, whose bytes are the file's; it is there once the block ends
        without an error, and nothing of it if with one. Nobody may hold any of the memory then.

        Args:
            told: of bytes that are on the disk; may raise, where somebody wants no file any more.

        Raises:
            DiskError: the disk is full, or refuses.
        """
        remove_leftovers(self.path.parent)
        part = self.path.with_name(unfinished_name(self.path.name))
        had_folder = os.path.exists(self.path.parent)
        try:
            self._make_room()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("w+b") as stream:
                _allocate(stream.fileno(), self.num_bytes)
                stream.write(self.head)
                stream.flush()
                taken: list[mmap.mmap] = []
                yield lambda num_bytes: self._next(stream.fileno(), taken, num_bytes)
                done = 0
                while taken:  # a file that is mapped cannot be renamed on Windows
                    done = _flush(taken.pop(), done, told)
                os.fsync(stream.fileno())
            os.replace(part, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            remedy = "set LOCALMOE_HOME to a folder on another disk, or where files may be written"
            if error.errno in _FULL:
                remedy = "make room on that disk, or set LOCALMOE_HOME to a folder on another one"
            elif error.errno == errno.ENOENT:
                remedy = "it was deleted while it was written, so load the model again"
            raise DiskError(
                f"The experts' file {self.path} cannot be written ({error.strerror or error}): {remedy}."
            ) from error
        finally:
            with suppress(OSError):  # it is not there, as a rule
                part.unlink()
            if not had_folder:
                with suppress(OSError):  # if it holds nothing: lists show it as made of the model
                    self.path.parent.rmdir()

    def _next(self, handle: int, taken: list[mmap.mmap], num_bytes: int) -> mmap.mmap:
        layer = len(taken)
        assert num_bytes == self.stride(layer) * self.num_experts, "layers are taken in turn"
        taken.append(mmap.mmap(handle, num_bytes, offset=self._begins[layer]))
        return taken[-1]


def _name(layouts: Sequence[RecordLayout], dtype: torch.dtype) -> str:
    return f"experts-{layouts[0].form.name.lower()}-{str(dtype).removeprefix('torch.')}.records"


def _flush(memory: mmap.mmap, done: int, told: Callable[[int], None]) -> int:
    """Bytes that are on the disk behind it."""
    for start in range(0, len(memory), _SYNCED_BYTES):
        told(done + start)
        memory.flush(start, min(_SYNCED_BYTES, len(memory) - start))
    return done + len(memory)


def _allocate(handle: int, num_bytes: int) -> None:
    """So that a full disk is told now: memory that is the file's cannot tell."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, num_bytes)
    else:
        os.truncate(handle, num_bytes)
