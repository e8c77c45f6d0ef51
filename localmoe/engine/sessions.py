"""An engine's session, and the RAM that texts may take which it has left. Runs nothing."""

from __future__ import annotations

from localmoe.chat.prompt_cache import PromptCache
from localmoe.chat.session import Session
from localmoe.core.config import EngineConfig
from localmoe.engine.loading import EngineParts
from localmoe.hardware.cpu import ram_bytes
from localmoe.hardware.host_room import texts_room


def new_session(parts: EngineParts, config: EngineConfig) -> Session:
    """Of the text that the loaded model holds. What is made up to be measured keeps no others."""
    limit, state = config.prompt_cache_bytes, parts.runner.sequence
    if limit == 0 or parts.passes.synthetic is not None:
        return Session(state)
    return Session(state, PromptCache(lambda held: texts_room(*ram_bytes(), held, limit)))
