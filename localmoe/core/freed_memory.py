"""Memory that was freed, and that the C library keeps for this process. Frees nothing itself."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Give it back to the system, where the library can: glibc keeps pieces below 32 MB, which is what many
    of a model's tensors take, and after some loads that is more than the model."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries than glibc have none
    if trim is not None:
        trim(0)
