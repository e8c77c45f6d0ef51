"""The CPU lane's code, compiled before it is needed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from localmoe.experts import lane_code
from localmoe.experts.lane_code import LaneCode
from localmoe.experts.records import RecordLayout
from localmoe.kernels.activations import Activation
from localmoe.kernels.cpu import worker

CODE = LaneCode(
    RecordLayout((32, 16), (16, 16), False), torch.bfloat16, Activation("silu"), tokens=4, top_k=2
)
WHO_COMPILES = """
import threading
from localmoe.kernels.cpu import worker
from test_lane_code import CODE

CODE.prepare(threading.Event())
stats = worker.run._entry.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.slow
def test_it_is_compiled_in_another_process_and_only_read_in_this_one(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{here}"}
    done = subprocess.run(
        [sys.executable, "-c", WHO_COMPILES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["1", "0"], done.stderr[-2000:]


def test_told_to_stop_it_ends_at_once_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_code, "_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(LaneCode, "compile", lambda self: pytest.fail("it goes on"))
    stop, others = threading.Event(), children()
    thread = threading.Thread(target=CODE.prepare, args=(stop,))
    thread.start()
    deadline = time.monotonic() + 10
    while children() == others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children() > others
    stop.set()
    thread.join(5)
    assert not thread.is_alive() and children() == others


@pytest.mark.parametrize("how", ["no interpreter", "an error"])
def test_where_no_process_compiles_it_this_one_does(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "localmoe")
    compiled = []
    monkeypatch.setattr(LaneCode, "compile", lambda self: compiled.append(self))
    if how == "no interpreter":
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    else:
        monkeypatch.setattr(lane_code, "_PROGRAM", "raise SystemExit('no memory')")
    CODE.prepare(threading.Event())
    assert compiled == [CODE]
    assert ("No such file" if how == "no interpreter" else "no memory") in caplog.text


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    CODE.compile()
    assert threading.active_count() == before and worker.run._entry.overloads
