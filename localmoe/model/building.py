"""Building transformers models one at a time. Builds none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TURN = threading.Lock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """transformers sets PyTorch's default dtype, which is the whole process's, while it builds a model, and
    then back to what it found: of two at once, one would find the other's and leave it behind."""
    with _TURN:
        yield
