"""How kernels are launched, or compiled without being launched, many at a time. Knows none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

_THREADS = 8  # that compile: each takes some 100 MB meanwhile
_COMPILED: ContextVar[list[Any] | None] = ContextVar("localmoe_compiled", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options); inside `compiling` it is compiled only."""
    compiled = _COMPILED.get()
    if compiled is None:
        kernel[grid](*args, **options)
    else:
        compiled.append(kernel.warmup(*args, grid=grid, **options))


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels that are launched inside are compiled, side by side, and do not run; all of them are ready to
    be launched at the end. What they would have written is zero."""
    compiled: list[Any] = []
    token = _COMPILED.set(compiled)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            # errors come up where kernels are loaded: Triton's mode would stay on after one
            with triton.AsyncCompileMode(threads, ignore_errors=True), _ZerosForEmpty():
                yield
            # None is what its interpreter gives
            each = {id(kernel): kernel for kernel in compiled if kernel is not None}
            if each:
                list(threads.map(partial(_load, torch.cuda.current_device()), each.values()))
    finally:
        _COMPILED.reset(token)


def _load(device: int, kernel: Any) -> None:
    """Bring a kernel to the device and make its launcher, which some versions of Triton compile, too."""
    with torch.cuda.device(device):
        built = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
        assert built.run is not None


class _ZerosForEmpty(TorchFunctionMode):
    """Outputs that no kernel fills must still be indices that PyTorch's own operators can follow."""

    _ZEROS: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = {
        torch.empty: torch.zeros,
        torch.empty_like: torch.zeros_like,
        Tensor.new_empty: Tensor.new_zeros,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept allocations."""
        return self._ZEROS.get(func, func)(*args, **(kwargs or {}))
