"""Keep PyTorch to one thread for a while: where other threads do what takes long, its own only take their
cores and are waited for. Runs nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()
_inside = 0  # of all threads
_threads = 1  # PyTorch's, when the first of them came
_depth = threading.local()


@contextmanager
def one_pytorch_thread() -> Iterator[None]:
    """For operations of the thread that calls. PyTorch counts thread by thread, but gives a new thread what
    was set last, so what it gets back is what there was while nobody was inside."""
    global _inside, _threads
    depth = getattr(_depth, "count", 0)
    with _LOCK:
        if _inside == 0:
            _threads = torch.get_num_threads()
        _inside += 1
    torch.set_num_threads(1)
    _depth.count = depth + 1
    try:
        yield
    finally:
        _depth.count = depth
        with _LOCK:
            _inside -= 1
        if depth == 0:
            torch.set_num_threads(_threads)
