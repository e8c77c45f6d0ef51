"""Calls the Hub's process: starts it when something is asked or soon will be, ends it when it idles. Makes no
request itself, so that the page's own process stays offline. Sets no limit to what a question may take."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from localmoe.core import errors
from localmoe.core.errors import LocalMoeError
from localmoe.core.types import Progress, ProgressCallback

IDLE_S = 60.0  # the process holds torch and transformers, which is memory that a model could use
COMMAND = (sys.executable, "-m", "localmoe.cli.hub_process")


class HubProcessError(LocalMoeError):
    """The Hub's process ended, or failed in a way that is no fault of the user."""


def online_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a process that may ask the Hub: as the user started localmoe, without the GPU."""
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    return {**environment, **quiet}


@dataclass
class _Process:
    """One run of the process. `answers`: queues of the calls that wait, by id."""

    popen: subprocess.Popen[str]
    answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def write(self, message: Mapping[str, Any]) -> None:
        assert self.popen.stdin is not None
        with self.writing:
            self.popen.stdin.write(json.dumps(message) + "\n")
            self.popen.stdin.flush()


class HubClient:
    """Many calls at once, each from a thread of its own."""

    def __init__(
        self, environment: Mapping[str, str], command: tuple[str, ...] = COMMAND, *, idle_s: float = IDLE_S
    ) -> None:
        """environment: of the process, see `online_environment`."""
        self._environment, self._command, self._idle_s = dict(environment), command, idle_s
        self._lock = threading.Lock()  # guards the names below
        self._process: _Process | None = None
        self._next_id = 0
        self._idle: threading.Timer | None = None
        self._closed = False

    def call(
        self,
        action: str,
        given: Mapping[str, Any],
        *,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        watch: Callable[[int], None] | None = None,
        poll_s: float = 0.1,
    ) -> Any:
        """The result of one action of cli.hub_process. watch: is given the process's id while it works; what
        it raises ends the process, with all that is asked of it.

        Raises:
            LocalMoeError: the action's own error, of its own class, or that of `watch`.
            HubProcessError: the process ended meanwhile, or cannot be started.
        """
        process, number, answers = self._begin(action, given)
        told = False
        try:
            while True:
                if cancel is not None and cancel.is_set() and not told:
                    told = True
                    self._write(process, {"cancel": number})
                try:
                    answer = answers.get(timeout=poll_s)
                except queue.Empty:
                    if watch is not None:
                        self._watch(process, watch)
                    continue
                if "progress" in answer:
                    if progress is not None:
                        progress(Progress(**answer["progress"]))
                elif "error" in answer:
                    raise _error(answer["error"])
                else:
                    return answer["result"]
        finally:
            self._end(process, number)

    def prepare(self) -> None:
        """Start the process in the background, as something will be asked soon: it takes seconds. It makes
        no request."""
        with self._lock:
            if self._process is not None or self._closed:
                return
        threading.Thread(target=self._prepare, name="hub-start", daemon=True).start()

    def close(self, patience_s: float = 5.0) -> None:
        """End the process; calls under way fail. Later calls are refused. patience_s: that it has to end by
        itself."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
            if self._idle is not None:
                self._idle.cancel()
        _stop(process, patience_s)

    def _prepare(self) -> None:
        with contextlib.suppress(HubProcessError):  # what is asked next meets it too, and says so
            self.call("prepare", {})

    def _watch(self, process: _Process, watch: Callable[[int], None]) -> None:
        try:
            watch(process.popen.pid)
        except LocalMoeError:
            with self._lock:  # so that the next call starts another one
                if self._process is process:
                    self._process = None
            process.popen.kill()
            raise

    def _begin(
        self, action: str, given: Mapping[str, Any]
    ) -> tuple[_Process, int, queue.SimpleQueue[dict[str, Any]]]:
        with self._lock:
            if self._closed:
                raise HubProcessError("localmoe is ending.")
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            if self._process is None:
                self._process = self._start()
            process = self._process
            self._next_id += 1
            number, answers = self._next_id, queue.SimpleQueue[dict[str, Any]]()
            process.answers[number] = answers
        self._write(process, {"id": number, "do": action, "with": dict(given)})
        return process, number, answers

    def _start(self) -> _Process:
        try:
            popen = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
                env=self._environment, cwd=os.getcwd(), start_new_session=os.name != "nt",
            )  # fmt: skip
        except OSError as error:
            raise HubProcessError(f"The Hub's process cannot be started ({error.strerror}).") from None
        process = _Process(popen)
        threading.Thread(target=self._read, args=(process,), name="hub-answers", daemon=True).start()
        return process

    def _read(self, process: _Process) -> None:
        """Hand answers out until the process ends; calls that still wait then fail."""
        assert process.popen.stdout is not None and process.popen.stdin is not None
        with process.popen.stdout as lines, contextlib.suppress(ValueError):  # of a line that it died in
            for line in lines:
                message = json.loads(line)
                with self._lock:
                    answers = process.answers.get(int(message.pop("id")))
                if answers is not None:
                    answers.put(message)
        _stop(process)
        with self._lock:
            if self._process is process:
                self._process = None
            waiting = list(process.answers.values())
        for answers in waiting:
            answers.put({"error": {"kind": HubProcessError.__name__, "text": ""}})

    def _write(self, process: _Process, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended: `_read` tells every call that waits
            process.write(message)

    def _end(self, process: _Process, number: int) -> None:
        with self._lock:
            process.answers.pop(number, None)
            if process is self._process and not process.answers and not self._closed:
                self._idle = threading.Timer(self._idle_s, self._end_idle, (process,))
                self._idle.daemon = True
                self._idle.start()

    def _end_idle(self, process: _Process) -> None:
        with self._lock:
            if process is not self._process or process.answers:
                return
            self._process = None
        _stop(process)


def _stop(process: _Process | None, patience_s: float = 5.0) -> None:
    """The end of its input ends it; a process that hangs is killed."""
    if process is None:
        return
    if process.popen.stdin is not None:
        with contextlib.suppress(OSError):  # it has ended already
            process.popen.stdin.close()
    try:
        process.popen.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.popen.kill()
        process.popen.wait()


def _error(answer: Mapping[str, str]) -> LocalMoeError:
    """The error that was raised there, as far as its class is one of the core's."""
    kind: Callable[[str], LocalMoeError] | None = getattr(errors, answer["kind"], None)
    if isinstance(kind, type) and issubclass(kind, LocalMoeError):
        return kind(answer["text"])
    return HubProcessError(
        "The part of localmoe that talks to the Hub ended unexpectedly; the terminal window shows the "
        "details. Try again."
    )
