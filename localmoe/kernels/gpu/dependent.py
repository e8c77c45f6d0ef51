"""Kernels that start while the one before them ends: programmatic dependent launch, from compute capability
9.0 on. Decides which launches are such, and how a kernel behaves then.

A kernel that is launched so waits for the one before it before it touches any memory. Then all kernels before
it in the stream are complete, since each of them has waited too. A kernel that is launched without these
options waits for all of that by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localmoe.kernels.cuda_driver import driver_version

_FIRST_CAPABILITY = (9, 0)
_FIRST_DRIVER = 12_040  # CUDA 12.4: older drivers cannot capture such launches in a graph


@cache
def after_previous(device: torch.device) -> Mapping[str, bool]:
    """Options of a launch on that device: the kernel's constant DEPENDENT, and Triton's own."""
    capable = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
        and driver_version() >= _FIRST_DRIVER
    )
    return {"DEPENDENT": True, "launch_pdl": True} if capable else {"DEPENDENT": False}


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr, SMALL: tl.constexpr = False):
    """Until the kernel before this one is complete and what it wrote is visible. SMALL: a kernel of few
    programs then lets the next one come beside it, to be there when it ends; one of many would lose
    multiprocessors to what can only wait."""
    if DEPENDENT:
        gdc_wait()
        if SMALL:
            gdc_launch_dependents()
