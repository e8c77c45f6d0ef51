"""Kernels compiled by other processes: found in Triton's cache, and nothing is left of the processes. Needs
no GPU, but Triton's compiler, so all of it runs in a process in which that is on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("triton")

from localmoe.kernels.gpu import compile_processes

ROOT = Path(__file__).resolve().parents[3]

PROLOGUE = """
import dataclasses, json, os, threading, time
from triton import knobs
from triton.backends.compiler import GPUTarget
from localmoe.kernels.gpu.compile_processes import CompileProcesses, KernelSpec

def spec(block=1024, name="_add", module="localmoe.kernels.gpu.add"):
    types = {name: "*bf16" for name in ("a", "b", "out")} | {"count": "i32", "scale": "fp32"}
    types |= {"SCALED": "constexpr", "BLOCK": "constexpr", "DEPENDENT": "constexpr"}
    constants = {"SCALED": False, "BLOCK": block, "DEPENDENT": False}
    return KernelSpec(module, name, types, constants, {}, {"num_warps": 4}, GPUTarget("cuda", 90, 32))

def begun(number):
    processes = CompileProcesses(number)
    assert not processes.compile(spec()), "none is ready at once"
    while not processes._ready:
        assert processes._reader.is_alive(), "they did not begin"
        time.sleep(0.02)
    return processes

"""
COMPILED = """
found = []
knobs.compilation.listener = lambda **said: found.append(said["cache_hit"])
with begun(2) as processes:
    said = [processes.compile(spec(block)) for block in (512, 1024)]
    said += [processes.compile(spec(name=name)) for name in ("_no_such_kernel", "add")]
    said += [processes.compile(spec(module=lambda: "cannot be sent")), processes.compile(spec(256))]
    waiting = threading.Thread(target=lambda: said.append(processes.compile(spec(4096))))
    waiting.start()
    while not processes._asked and waiting.is_alive():
        time.sleep(0.001)
waiting.join()
for block in (256, 512, 1024, 2048):
    spec(block).compile()
print(json.dumps([said, found, processes.compile(spec()), processes._child.pid]))
"""
ENDED = """
for how in ("killed", "left behind"):
    processes = begun(3)
    print(processes._child.pid, flush=True)
    if how == "killed":
        os.killpg(processes._child.pid, 9)
        assert not processes.compile(spec())
        processes.close()
threading.Event().wait()
"""


def script(text: str, cache: Path) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + text],
        env={**kept, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def said_by(text: str, cache: Path) -> Any:
    with script(text, cache) as process:
        try:
            out, error = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, error[-2000:]
    return json.loads(out)


def of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def soon(there: int, session: int) -> bool:
    """Whether there is a moment, before long, at which so many processes of the session are there: while one
    of them compiles, Triton's assembler is a further one."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if len(of_session(session)) == there:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_what_they_compile_is_found_and_what_they_cannot_is_said(tmp_path: Path) -> None:
    said, found, later, session = said_by(COMPILED, tmp_path)
    assert said[:-1] == [True, True, False, False, False, True]
    assert said[-1] in (False, True), "who waited when they were closed was told"
    assert found == [True, True, True, False], "2048 was not asked for"
    assert later is False, "they are closed"
    assert soon(0, session)


def test_without_a_process_nothing_is_compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **options: Any) -> Any:
        raise OSError("no process is left")

    monkeypatch.setattr(compile_processes.subprocess, "Popen", none)
    with compile_processes.CompileProcesses(2) as processes:
        assert not processes.compile(compile_processes.KernelSpec("m", "k", {}, {}, {}, {}, None))


@pytest.mark.slow
def test_they_end_when_they_are_killed_or_left_behind(tmp_path: Path) -> None:
    with script(ENDED, tmp_path) as process:
        try:
            assert process.stdout is not None
            killed, left = int(process.stdout.readline()), int(process.stdout.readline())
            assert soon(3, left)
        finally:
            process.kill()
    assert soon(0, killed) and soon(0, left)
