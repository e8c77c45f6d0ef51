"""Loops that numba compiles, and what goes wrong with that. Knows none of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from localmoe.core.uncollected import uncollected

_LOG = logging.getLogger(__name__)


def compile_loop(loop: Callable[..., Any], signature: str, what: str, **options: Any) -> Callable[..., Any]:
    """The loop, compiled for arguments of these types; kept on disk. Where it cannot be kept, or is damaged
    there, it is compiled at each start. what: the loop is of, for people.

    Raises:
        ImportError: there is no numba, or it refuses this numpy.
    """
    from numba import njit

    with uncollected():
        try:
            made = njit(signature, cache=True, **options)(loop)
        except Exception as error:  # no folder, a full disk, half a file: numba says each in its own way
            _LOG.warning("What was compiled of %s cannot be kept or read again: %r", what, error)
            made = njit(signature, **options)(loop)  # what is wrong with the loop itself is said here
    compiled: Callable[..., Any] = made
    return compiled


@cache
def optional_loops(module: str, otherwise: str) -> Any:
    """A module of compiled loops, which several threads can run at once; None without numba, and `otherwise`,
    what is done then, is said once."""
    try:
        return import_module(module)
    except ImportError as error:
        _LOG.warning("%s by PyTorch, which takes longer: %s", otherwise, error)
        return None
