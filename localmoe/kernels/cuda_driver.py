"""Calls of the CUDA driver that PyTorch does not make for us, or not as fast; there has to be one. Decides
nothing."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

_KERNEL_EXEC_TIMEOUT = 17  # of CUdevice_attribute


class DriverCallError(Exception):
    """The driver refused; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with error {code}")
        self.code = code


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _copy_to_device() -> Callable[[int, int, int, int], int]:
    call = _driver().cuMemcpyHtoDAsync_v2
    call.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    call.restype = ctypes.c_int
    return call


def copy_to_device(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Start a copy from host memory, in the order of a stream (its handle). A context has to be current in
    this thread, as after any call of PyTorch that uses the GPU.

    Raises:
        DriverCallError: the driver refuses.
    """
    code = _copy_to_device()(target, source, num_bytes, stream)
    if code != 0:
        raise DriverCallError("cuMemcpyHtoDAsync", code)


def driver_version() -> int:
    """The newest CUDA that the driver knows, 1000 * major + 10 * minor; 0 if it does not say."""
    version = ctypes.c_int(0)
    _driver().cuDriverGetVersion(ctypes.byref(version))
    return version.value


def limits_run_time(device: int) -> bool:
    """Whether kernels of the device may take so long only; False where the driver does not say."""
    limited, handle = ctypes.c_int(0), ctypes.c_int(0)  # CUdevice
    _driver().cuInit(0)
    if _driver().cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)) != 0:
        return False
    _driver().cuDeviceGetAttribute(ctypes.byref(limited), ctypes.c_int(_KERNEL_EXEC_TIMEOUT), handle)
    return bool(limited.value)


def device_address(host_address: int) -> int:
    """Where the current device finds host memory that is registered. On Linux that is the host's own address;
    where Windows manages the GPU's memory (WDDM) it is another one, and kernels that use the host's fail.

    Raises:
        DriverCallError: the memory is not registered, or no context is current in this thread.
    """
    found = ctypes.c_uint64(0)  # CUdeviceptr
    call = _driver().cuMemHostGetDevicePointer_v2
    code = int(call(ctypes.byref(found), ctypes.c_void_p(host_address), ctypes.c_uint(0)))
    if code != 0:
        raise DriverCallError("cuMemHostGetDevicePointer", code)
    return found.value
