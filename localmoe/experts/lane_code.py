"""Compile the CPU lane's code ahead of need, for numba to keep on disk: in a process of its own, since its
compiler holds Python's lock for seconds, in which reading weights and compiling kernels would stand still.
"""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass

import torch

from localmoe.core.child_process import child_environment
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.host_store import HostStore
from localmoe.experts.records import RecordLayout
from localmoe.kernels.activations import Activation

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1
_PROGRAM = "from localmoe.experts.lane_code import main; main()"


@dataclass(frozen=True, slots=True)
class LaneCode:
    """What the code is compiled for: an expert's layout, dtype and activation, and how large a window is."""

    layout: RecordLayout
    dtype: torch.dtype
    activation: Activation
    tokens: int
    top_k: int

    def prepare(self, stop: threading.Event) -> None:
        """Compile in another process, then read here what it left. Where no process can be had, compile
        here. `stop` ends it early."""
        if self._compile_beside(stop):
            self.compile()

    def compile(self) -> None:
        """In this process; what is on disk is only read."""
        store = HostStore([self.layout], 1, self.dtype)
        lane = CpuLane(
            store, self.activation, [(None, None)],
            tokens=self.tokens, top_k=self.top_k, threads=0, pinned=False,
        )  # fmt: skip
        lane.close()

    def _compile_beside(self, stop: threading.Event) -> bool:
        """Whether to go on: it was not stopped."""
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM], env=child_environment(),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            _LOG.debug("no process to compile the CPU lane in: %s", error)
            return True
        with child:
            given: bytes | None = pickle.dumps(self)
            while not stop.is_set():
                try:
                    _, said = child.communicate(given, timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    given = None  # it has that
                    continue
                if child.returncode:
                    _LOG.debug("compiling the CPU lane beside failed: %s", said.decode(errors="replace"))
                return True
            child.kill()
        return False


def main() -> None:
    """Compile for the LaneCode on standard input, pickled."""
    code: LaneCode = pickle.load(sys.stdin.buffer)
    code.compile()
