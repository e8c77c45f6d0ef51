"""Load, stream, close: the one way into localmoe for the page, the command line and the API.

Names are imported when they are first asked for: what only plans, or only downloads, needs no draft builder.
"""

from __future__ import annotations

import threading
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from localmoe.core.uncollected import uncollected

if TYPE_CHECKING:
    from localmoe.engine.drafting import build_draft
    from localmoe.engine.engine import Engine
    from localmoe.engine.info import EngineInfo
    from localmoe.engine.planning import plan_model

__all__ = ["Engine", "EngineInfo", "build_draft", "import_all", "plan_model"]
_IMPORTING = threading.Lock()
_HOMES = {"Engine": "engine", "EngineInfo": "info", "build_draft": "drafting", "plan_model": "planning"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with uncollected():
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def import_all() -> None:
    """Import every module of this package, in one thread at a time; takes seconds once.

    A program of several threads calls it before any of them imports from this package: where two import torch
    or transformers at once, each in its own order, one waits for what the other has half imported, and Python
    ends its import as a deadlock, or leaves it with a broken module.
    """
    with _IMPORTING, uncollected(for_good=True):
        for module in iter_modules(__path__):
            import_module(f"{__name__}.{module.name}")
        import_module("localmoe.prefetch.loops")  # policies do when they are made, in whatever thread
