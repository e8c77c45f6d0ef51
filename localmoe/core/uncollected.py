"""Importing and compiling without Python's search for garbage, which finds little there. Imports nothing
itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """What is made within is not looked through for garbage: modules, classes and functions stay, but each of
    them brings the next search nearer, which are a tenth of the time of importing torch and transformers, and
    a seventh of the time that numba takes to compile.

    For several threads at once: what one of them leaves on is on for all.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
