"""Compile kernels in other processes, for Triton to find in its cache: threads that compile hold Python's
lock, so that they slow down each other, and a load beside them by more than they take. Knows no kernel.

One process imports what is needed and forks the others, which read their jobs from one socket: a message is
a job, whoever is free takes the next. They end when the socket's other end is closed, however that happens.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from localmoe.core.child_process import child_environment

_LOG = logging.getLogger(__name__)
_PROGRAM = "from localmoe.kernels.gpu.compile_processes import main; main()"
_PATIENCE_S = 60.0  # for one kernel; one whose process was ended by others never comes
_GRACE_S = 0.5  # in which those without a job end by themselves
_MOST_BYTES = 1 << 16  # of a message
_READY = -1


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What Triton compiles: the kernel's module and name, and how its arguments are specialised."""

    module: str
    name: str
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attrs: Mapping[Any, Any]
    options: Mapping[str, Any]
    target: Any

    @classmethod
    def of(cls, said: Mapping[str, Any], target: Any) -> KernelSpec:
        """Of what Triton tells its cache hook before it compiles."""
        kernel, how = said["fn"].jit_function.fn, said["compile"]
        options = json.loads(how["specialization_data"])["options"]
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        (attrs,) = how["configs"]
        return cls(
            kernel.__module__, kernel.__qualname__, how["signature"], how["constants"], attrs, options, target
        )

    def compile(self) -> None:
        """Into Triton's cache; no device is needed."""
        kernel: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            kernel = getattr(kernel, part)
        source = ASTSource(kernel, dict(self.signature), dict(self.constants), dict(self.attrs))
        triton.compile(source, target=self.target, options=dict(self.options))


class CompileProcesses:
    """Processes that compile until they are closed."""

    def __init__(self, number: int) -> None:
        """Returns at once. Where no process can be had, none compiles."""
        self._lock = threading.Lock()
        self._asked: dict[int, Future[bool]] = {}
        self._number = 0
        self._ready = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._child: subprocess.Popen[bytes] | None = None
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(number)],
                    env=child_environment(), pass_fds=[theirs.fileno()], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                _LOG.debug("no process to compile in: %s", error)
        self._reader = threading.Thread(target=self._read, name="compile-processes", daemon=True)
        self._reader.start()

    @staticmethod
    def can_be_had() -> bool:
        """Whether this system knows such processes and sockets."""
        return hasattr(os, "fork") and hasattr(socket, "SOCK_SEQPACKET")

    def compile(self, spec: KernelSpec) -> bool:
        """Whether the kernel is in Triton's cache; waits for it. False at once while no process is ready."""
        answer: Future[bool] = Future()
        with self._lock:
            if not self._ready:
                return False
            self._number += 1
            number = self._number
            self._asked[number] = answer
        try:
            message = pickle.dumps((number, spec))
            if len(message) > _MOST_BYTES:
                raise OSError(f"its message has {len(message)} bytes")
            self._socket.send(message)
            return answer.result(_PATIENCE_S)
        except FutureTimeoutError:
            error: str | Exception = f"no answer in {_PATIENCE_S:g} s"
        except (OSError, pickle.PicklingError, TypeError, AttributeError) as failed:  # pickle raises each
            error = failed
        _LOG.debug("%s is not compiled elsewhere: %s", spec.name, error)
        with self._lock:
            self._asked.pop(number, None)
        return False

    def _read(self) -> None:
        while message := self._receive():
            number, error = pickle.loads(message)
            if number == _READY:
                self._ready = True
                continue
            if error is not None:
                _LOG.debug("a kernel was not compiled elsewhere: %s", error)
            with self._lock:
                answer = self._asked.pop(number, None)
            if answer is not None:  # still waited for
                answer.set_result(error is None)
        with self._lock:
            self._ready = False
            left, self._asked = self._asked, {}
        for answer in left.values():
            answer.set_result(False)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_MOST_BYTES)
        except OSError:  # reset, as their end was closed with messages in it
            return b""

    def close(self) -> None:
        """End all of them, also those that are compiling."""
        self._socket.shutdown(socket.SHUT_RDWR)
        if self._child is not None:
            try:
                self._child.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()
        self._reader.join()
        self._socket.close()

    def __enter__(self) -> CompileProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """Compile what comes through the socket whose descriptor is the first argument, in as many processes as
    the second one says."""
    jobs, number = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    package = importlib.import_module(__name__.rpartition(".")[0])
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
    others: list[int] = []
    for _ in range(number - 1):
        process = os.fork()
        if not process:
            others = []
            break
        others.append(process)
    _serve(jobs)
    for process in others:
        os.waitpid(process, 0)
    os._exit(0)


@triton.jit
def _smallest(at):
    tl.store(at, 0.0)


def _serve(jobs: socket.socket) -> None:
    # Triton's first compilation takes a second more than the next ones
    KernelSpec(__name__, _smallest.__name__, {"at": "*fp32"}, {}, {}, {}, GPUTarget("cuda", 80, 32)).compile()
    jobs.send(pickle.dumps((_READY, None)))
    while message := jobs.recv(_MOST_BYTES):
        number, spec = pickle.loads(message)
        try:
            spec.compile()
            error = None
        except Exception as failed:  # it is compiled where it is launched, and refused there
            error = f"{type(failed).__name__}: {failed}"[:1000]
        jobs.send(pickle.dumps((number, error)))
