"""How kernels are launched, or compiled without being launched, many at a time. Knows none of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.compiler import CompiledKernel

from localmoe.kernels.gpu.compile_processes import CompileProcesses, KernelSpec

P = ParamSpec("P")
R = TypeVar("R")
_LOG = logging.getLogger(__name__)
THREADS = 8  # that compile: each takes some 100 MB meanwhile


class CompilingStopped(Exception):
    """Compiling was told to stop."""


class _Compiled:
    """What is compiled in a block, and who may end it early."""

    def __init__(self, stop: threading.Event | None) -> None:
        self.launches: list[tuple[Any, Any]] = []  # (function, what its warmup gave)
        self.kinds: set[Hashable] = set()
        self._stop = stop

    def check(self) -> None:
        """Raises CompilingStopped: so it was told."""
        if self._stop is not None and self._stop.is_set():
            raise CompilingStopped("Compiling was stopped.")


_PROCESSES: ContextVar[CompileProcesses | None] = ContextVar("localmoe_processes", default=None)
_COMPILED: ContextVar[_Compiled | None] = ContextVar("localmoe_compiled", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """kernel[grid](*args, **options), which gives what Triton has compiled for it; inside `compiling` it is
    compiled only."""
    compiled = _COMPILED.get()
    if compiled is None:
        # Triton asks each tensor for some things, which cost a call of Python each where a mode listens
        with torch._C.DisableTorchFunction():
            return kernel[grid](*args, **options)
    compiled.check()
    kind = _kind(kernel, args, options)
    if kind not in compiled.kinds:  # to Triton each launch is a new one until its kernel is compiled
        compiled.kinds.add(kind)
        compiled.launches.append((kernel, kernel.warmup(*args, grid=grid, **options)))
    return None


def without_modes(function: Callable[P, R]) -> Callable[P, R]:
    """A host's part of a kernel, in which no mode of PyTorch's listens: it would be asked for each size or
    address of a tensor, in a call of Python, which takes a layer's launches as long as ten more."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _COMPILED.get() is not None:  # whose own mode it is
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


class RepeatedLaunch:
    """A kernel that is launched outside of graphs in every step, while the GPU waits: Triton looks at its
    arguments the first time only."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[Hashable, CompiledKernel] = {}

    def __call__(self, kind: Hashable, grid: tuple[int, int, int], *args: Any, **constants: Any) -> None:
        """As `launch`.

        Args:
            kind: equal only where Triton compiles the same code for the same device.
            constants: in the order of the kernel's parameters, of which they are the last ones.
        """
        compiled = self._compiled.get(kind)
        if compiled is not None and _COMPILED.get() is None:
            compiled[grid](*args, *constants.values())
            return
        made = launch(self._kernel, grid, *args, **constants, **self._options)
        if isinstance(made, CompiledKernel):
            self._compiled[kind] = made


def _kind(kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Hashable:
    """Equal only for launches that run the same compiled code."""
    of_args = [
        (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, Tensor) else (type(arg), arg) for arg in args
    ]
    return (kernel, *of_args, *((name, type(value), value) for name, value in options.items()))


@contextmanager
def compiled_by(processes: CompileProcesses) -> Iterator[None]:
    """What this thread compiles inside, it leaves to these."""
    token = _PROCESSES.set(processes)
    try:
        yield
    finally:
        _PROCESSES.reset(token)


@contextmanager
def compiling(stop: threading.Event | None = None) -> Iterator[None]:
    """Kernels that this thread launches inside are compiled, side by side, and do not run; all of them are
    ready to be launched at the end, by any thread. What they would have written is zero. After an error none
    of it counts: what was not compiled is compiled when it is launched.

    Raises:
        CompilingStopped: `stop` was set; what was under way is complete.
    """
    compiled = _Compiled(stop)
    token = _COMPILED.set(compiled)
    try:
        with _Threads(compiled, _PROCESSES.get()) as threads:
            # errors come up below: Triton's mode would stay on after one
            with threads.told(), triton.AsyncCompileMode(threads, ignore_errors=True), _ZerosForEmpty():
                yield
            # None is what its interpreter gives
            each = {id(built): built for _, built in compiled.launches if built is not None}
            if each:
                list(threads.map(partial(_load, torch.cuda.current_device()), each.values()))
    except BaseException:
        _forget_failed(function for function, built in compiled.launches if built is not None)
        raise
    finally:
        _COMPILED.reset(token)


class _Threads(ThreadPoolExecutor):
    """Load each kernel as soon as it is compiled, and begin nothing more once told to stop."""

    def __init__(self, compiled: _Compiled, processes: CompileProcesses | None) -> None:
        super().__init__(THREADS, thread_name_prefix="compile")
        self._compiled = compiled
        self._processes = processes
        self._next: KernelSpec | None = None  # of what is submitted next
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As Executor.submit."""
        spec, self._next = self._next, None

        def run() -> Any:
            self._compiled.check()
            if spec is not None and self._processes is not None:
                self._processes.compile(spec)  # into Triton's cache, where fn looks first
                self._compiled.check()
            made = fn(*args, **kwargs)
            if isinstance(made, CompiledKernel):
                assert self._device is not None, "only the interpreter runs without a device"
                _load(self._device, made)
            return made

        return super().submit(run)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Triton says what it is about to submit."""
        if self._processes is None:
            yield
            return
        thread, before = threading.get_ident(), knobs.runtime.jit_cache_hook
        target = triton.runtime.driver.active.get_current_target()

        def note(**said: Any) -> bool:
            if threading.get_ident() == thread:
                try:
                    self._next = KernelSpec.of(said, target)
                except Exception as error:  # another Triton may say it otherwise; it is compiled here then
                    _LOG.debug("kernels are compiled in this process: %s", error)
            return bool(before and before(**said))

        knobs.runtime.jit_cache_hook = note
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before


def _forget_failed(functions: Iterable[Any]) -> None:
    """Triton keeps what it began to compile, and would raise its old error at every launch."""
    for function in functions:
        for built, *_ in function.device_caches.values():
            for key, kernel in list(built.items()):
                if isinstance(kernel, triton.FutureKernel) and kernel.kernel is None:
                    built.pop(key, None)


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
