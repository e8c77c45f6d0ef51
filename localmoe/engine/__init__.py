"""Load, stream, close: the one way into localmoe for the page, the command line and the API."""

from localmoe.engine.drafting import build_draft
from localmoe.engine.engine import Engine
from localmoe.engine.info import EngineInfo
from localmoe.engine.planning import plan_model

__all__ = ["Engine", "EngineInfo", "build_draft", "plan_model"]
