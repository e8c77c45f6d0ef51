"""Host RAM for weights: pages of anonymous memory, and their registering with the CUDA driver. Knows nothing
of what lies there.
"""

from __future__ import annotations

import logging
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

from localmoe.core.errors import BudgetError, HardwareError
from localmoe.core.units import format_bytes
from localmoe.kernels.cuda_driver import DriverCallError, device_address

_LOG = logging.getLogger(__name__)


class PinnedPieces:
    """Pieces of host memory that a GPU reaches in place, by a number that the caller gives each."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}  # number -> address
        self._shifts: dict[int, int] = {}  # number -> from the address on the host to that on the device

    def pin(self, number: int, memory: Tensor, all_bytes: int | None = None) -> None:
        """Register a piece; one that is registered stays so. From one thread at a time.

        Args:
            all_bytes: of the pieces together, for the refusal; None: it is the only one.

        Raises:
            HardwareError: the driver refuses.
        """
        if number in self._registered:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code != 0:
            raise HardwareError(
                f"The CUDA driver refused to pin {format_bytes(all_bytes or memory.nbytes)} of host memory "
                f"(error {code}): close other programs or choose a smaller model."
            )
        self._registered[number] = memory.data_ptr()
        try:
            self._shifts[number] = device_address(memory.data_ptr()) - memory.data_ptr()
        except DriverCallError as error:
            _LOG.warning("the GPU is taken to find pinned memory where the host does: %s", error)

    def shift(self, number: int) -> int:
        """From an address of the piece on the host to that on the device."""
        return self._shifts.get(number, 0)

    def release(self) -> None:
        """Unregister all."""
        for pointer in self._registered.values():
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._registered.clear()
        self._shifts.clear()


def embedding_table(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Zeros (V, H). Raises as `anonymous_memory`."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    memory = anonymous_memory(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return torch.frombuffer(memory, dtype=dtype, count=shape[0] * shape[1]).view(shape)


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed pages, committed when first written. Private ones: the kernel gives huge pages to shared memory
    only where an administrator allows it, and small pages make the first touch many times slower.

    Raises:
        BudgetError: the system refuses it, which it may though so much is free.
    """
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetError(
            f"The system refuses {format_bytes(num_bytes)} of RAM for weights ({error.strerror or error}): "
            "raise the limit of this process (ulimit -v) or of all (vm.overcommit_memory), or use a smaller "
            "model."
        ) from error
    if sys.platform == "linux":
        # a forked child would get a copy of every pinned page at once, so it gets none of them
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(advice)
    return memory
