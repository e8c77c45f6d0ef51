"""Load, stream, close: the one way into localmoe for the page, the command line and the API.

Names are imported when they are first asked for: what only plans, or only downloads, needs no draft builder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localmoe.engine.drafting import build_draft
    from localmoe.engine.engine import Engine
    from localmoe.engine.info import EngineInfo
    from localmoe.engine.planning import plan_model

__all__ = ["Engine", "EngineInfo", "build_draft", "plan_model"]
_HOMES = {"Engine": "engine", "EngineInfo": "info", "build_draft": "drafting", "plan_model": "planning"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
