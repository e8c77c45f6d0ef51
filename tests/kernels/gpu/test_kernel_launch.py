"""Launching kernels: behind each other while the one before still ends, and compiling without launching."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

import triton
import triton.language as tl
from dense_cases import DEVICE, DTYPES, normal
from triton.compiler.errors import CompilationError

from localmoe.kernels import cuda_driver
from localmoe.kernels.gpu.add import _add, add
from localmoe.kernels.gpu.dependent import after_previous
from localmoe.kernels.gpu.launch import (
    CompilingStopped,
    RepeatedLaunch,
    _forget_failed,
    compiling,
    launch,
    without_modes,
)
from localmoe.kernels.gpu.linear import gemv, linear, linear_gated
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.router import route

ROOT = Path(__file__).resolve().parents[3]
DTYPE = DTYPES[0]
ON_GPU = DEVICE.type == "cuda"
ROUNDS = 40 if ON_GPU else 2
HIDDEN, INNER = (2048, 1408) if ON_GPU else (64, 96)


class Chain:
    """Layers of kernels, small and large in turn, each of which reads what the ones before it wrote."""

    def __init__(self) -> None:
        def made(*shape: int, seed: int) -> Tensor:
            return normal(*shape, dtype=DTYPE, seed=seed, scale=shape[-1] ** -0.5)

        self.square, self.up = made(HIDDEN, HIDDEN, seed=1), made(2 * INNER, HIDDEN, seed=2)
        self.down, self.gate = made(HIDDEN, INNER, seed=3), made(16, HIDDEN, seed=4)
        self.ones = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE)

    def run(self, x: Tensor, *, wait: bool) -> list[Tensor]:
        """What each layer and its router gave. wait: for every kernel before the next is launched."""

        def seen(*made: Tensor) -> None:
            if wait and ON_GPU:
                torch.cuda.synchronize()
            found.extend(made)

        found: list[Tensor] = []
        for _ in range(ROUNDS):
            normed = rms_norm(x, self.ones, 1e-6)
            seen(normed)
            product = linear(normed, self.square)
            seen(product)
            normed, x = rms_norm(product, self.ones, 1e-6, x)
            seen(normed, x)
            seen(*route(normed, self.gate, 4, score="softmax", renormalise=True))
            inner = linear_gated(normed, self.up)
            seen(inner)
            seen(out := linear(inner, self.down))
            seen(x := add(x, out))
            if x.shape[0] == 1:
                seen(gemv(x, self.square))
        return found


@pytest.mark.parametrize("rows", [1, 9, 200] if ON_GPU else [1, 3])
def test_kernels_behind_each_other_give_what_each_gives_alone(rows: int) -> None:
    chain, x = Chain(), normal(rows, HIDDEN, dtype=DTYPE)
    alone = chain.run(x, wait=True)
    for _ in range(5 if ON_GPU else 1):
        together = chain.run(x, wait=False)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain.run(x, wait=False)
        for _ in range(20):
            for tensor in captured:
                tensor.zero_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(alone, captured, strict=True))


@pytest.mark.parametrize(
    ("capability", "driver", "dependent"),
    [((9, 0), 12_040, True), ((12, 0), 13_000, True), ((8, 9), 13_000, False), ((9, 0), 12_020, False)],
)
def test_only_devices_and_drivers_that_can_launch_kernels_behind_each_other(
    capability: tuple[int, int], driver: int, dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        @staticmethod
        def cuDriverGetVersion(version: Any) -> int:
            version._obj.value = driver
            return 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: Driver)
    choose = after_previous.__wrapped__
    assert choose(torch.device("cuda"))["DEPENDENT"] == dependent
    assert ("launch_pdl" in choose(torch.device("cuda"))) == dependent
    assert choose(torch.device("cpu")) == {"DEPENDENT": False}


@pytest.mark.gpu
def test_this_device_says_what_it_can() -> None:
    capable = torch.cuda.get_device_capability(DEVICE) >= (9, 0)
    assert after_previous(DEVICE)["DEPENDENT"] == capable


def test_compiling_runs_nothing_and_leaves_zeros() -> None:
    x = normal(3, HIDDEN, dtype=DTYPE)
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE)
    with compiling():
        assert not add(x, x).any() and not rms_norm(x, weight, 1e-6).any()
        weights, index, _ = route(x, normal(16, HIDDEN, dtype=DTYPE), 4, score="softmax", renormalise=True)
        assert not weights.any() and not index.any()
    assert torch.equal(add(x, x), x + x)
    with pytest.raises(KeyError), compiling():
        raise KeyError("a pass failed")
    assert torch.equal(add(x, x), x + x)


CACHED = """
import torch
from triton import knobs
from localmoe.kernels.gpu.add import add
from localmoe.kernels.gpu.launch import compiling

done = []
knobs.runtime.jit_post_compile_hook = lambda **said: done.append(said["fn"].name)
x = torch.ones(4, 64, dtype=torch.bfloat16, device="cuda")
with compiling():
    add(x, x), add(x.half(), x.half()), add(x, x)
assert len(done) == 2, done
assert torch.equal(add(x, x), 2 * x) and len(done) == 2, done
"""


ELSEWHERE = """
import time
import torch
from triton import knobs
from localmoe.kernels.gpu.add import add
from localmoe.kernels.gpu.compile_processes import CompileProcesses
from localmoe.kernels.gpu.launch import compiled_by, compiling

found = []
knobs.compilation.listener = lambda **said: found.append(said["cache_hit"])
x = torch.ones(4, 64, dtype=torch.bfloat16, device="cuda")
with CompileProcesses(2) as processes, compiled_by(processes):
    while not processes._ready:
        assert processes._reader.is_alive(), "they did not begin"
        time.sleep(0.02)
    with compiling():
        add(x, x), add(x.half(), x.half()), add(x, x)
assert found == [True, True], found
assert knobs.runtime.jit_cache_hook is None
assert torch.equal(add(x, x), 2 * x) and len(found) == 2, found
"""


@pytest.mark.gpu
@pytest.mark.parametrize("script", [CACHED, ELSEWHERE], ids=["here", "by other processes"])
def test_what_was_compiled_is_what_is_launched(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_kind_of_launch_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, compiled = normal(3, HIDDEN, dtype=DTYPE), []
    monkeypatch.setattr(type(_add), "warmup", lambda kernel, *args, **options: compiled.append(args[3]))
    with compiling():
        add(x, x), add(x, x), add(x[:1], x[:1]), add(x.float(), x.float())
    assert compiled == [3 * HIDDEN, HIDDEN, 3 * HIDDEN]


def test_what_is_launched_again_and_again_is_looked_at_once_for_each_kind() -> None:
    looked: list[tuple[Any, ...]] = []
    ran: list[tuple[Any, ...]] = []

    class Compiled(triton.compiler.CompiledKernel):  # type: ignore[misc]
        def __init__(self) -> None:
            """Of nothing."""

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *args: ran.append((grid, *args))

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def run(*args: Any, **options: Any) -> Compiled:
                looked.append((grid, *args, options))
                return Compiled()

            return run

        def warmup(self, *args: Any, **options: Any) -> None:
            looked.append(("warmup", *args))

    again, grid = RepeatedLaunch(Kernel(), num_warps=2), (3, 1, 1)
    for number in range(3):
        again("a", grid, number, BLOCK=8)
    again("b", grid, 7, BLOCK=8)
    options = {"BLOCK": 8, "num_warps": 2}
    assert looked == [(grid, 0, options), (grid, 7, options)]
    assert ran == [(grid, 1, 8), (grid, 2, 8)], "constants in their order, options are in what was compiled"
    if ON_GPU:
        with compiling():
            again("a", grid, 9, BLOCK=8)
        assert looked[-1] == ("warmup", 9) and len(ran) == 2


def test_compiling_ends_when_it_is_told_to() -> None:
    x, stop = normal(3, HIDDEN, dtype=DTYPE), threading.Event()
    with pytest.raises(CompilingStopped), compiling(stop):
        add(x, x)
        stop.set()
        add(x, x)
        raise AssertionError("it goes on")
    assert torch.equal(add(x, x), x + x)


def test_what_could_not_be_compiled_is_not_kept() -> None:
    failed, pending, whole = (triton.FutureKernel(lambda kernel: None, Future()) for _ in range(3))
    failed.future.set_exception(OSError("the disk is full"))
    whole.future.set_result("a kernel")
    assert whole.result() == "a kernel"
    kept = {1: failed, 2: whole, 3: "an older kernel", 4: pending}
    _forget_failed([SimpleNamespace(device_caches={0: (kept, {}), 1: ({}, {})})] * 2)
    assert kept == {2: whole, 3: "an older kernel"}


@pytest.mark.gpu
def test_kernels_whose_compiling_was_stopped_can_be_launched() -> None:
    x, stop = normal(5, 3 * HIDDEN, dtype=DTYPE).half(), threading.Event()
    with pytest.raises(CompilingStopped), compiling(stop):
        for power in range(6):  # more than begin at once
            launch(_odd, (1,), x, ODD=2 * power + 1)
        stop.set()
        add(x, x)
    launch(_odd, (1,), x, ODD=11)
    assert float(x[0, 0]) == 11 and torch.equal(add(x, x), x + x)


@triton.jit
def _odd(x, ODD: tl.constexpr):
    tl.store(x, ODD)


@triton.jit
def _wrong(x, ODD: tl.constexpr):
    tl.static_assert(ODD % 2 == 1, "ODD is even")


@pytest.mark.gpu
def test_a_kernel_that_does_not_compile_is_said_and_the_next_ones_do() -> None:
    x = normal(4, 8, dtype=DTYPE)
    with pytest.raises(CompilationError, match="ODD is even"), compiling():
        launch(_wrong, (1,), x, ODD=2)
    with compiling():
        launch(_wrong, (1,), x, ODD=3)
        add(x, x)
    assert torch.equal(add(x, x), x + x)


class Heard(TorchFunctionMode):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_the_host_s_part_of_a_kernel_asks_no_mode_but_where_it_is_compiled_only() -> None:
    def sizes(x: torch.Tensor, *, more: int) -> tuple[int, ...]:
        return x.shape[0], x.stride(0), x.new_empty(more).numel()

    quiet = without_modes(sizes)
    assert quiet.__name__ == "sizes"
    with Heard() as mode:
        x = torch.zeros(3, 2)
        assert sizes(x, more=4) == (3, 2, 4) and mode.calls > 2
        before = mode.calls
        assert quiet(x, more=4) == (3, 2, 4) and mode.calls == before
        with compiling():
            before = mode.calls
            assert quiet(x, more=4) == (3, 2, 4) and mode.calls > before
        with pytest.raises(TypeError):
            quiet(x)  # type: ignore[call-arg]
        before = mode.calls
        assert x.shape == (3, 2) and mode.calls > before, "after an error it listens again"
