"""Importing and compiling without Python's search for garbage, which finds little there. Imports nothing
itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, for_good: bool = False) -> Iterator[None]:
    """What is made within is not looked through for garbage: modules, classes and functions stay, but each of
    them brings the next search nearer, which are a tenth of the time of importing torch and transformers, and
    a seventh of the time that numba takes to compile.

    For several threads at once: what one of them leaves on is on for all.

    Args:
        for_good: nor later, with all else that there is, if modules were imported within: half a million
            objects, which a search holds up everything for, by a third of a second to half of one. Where a
            program begins, before there is anything large that it may drop again.
    """
    was_on, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if for_good and len(sys.modules) > known:
            gc.freeze()
        if was_on:
            gc.enable()
