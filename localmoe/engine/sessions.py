"""An engine's session, and the RAM that texts may take which it has left. Runs no pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from localmoe.chat.prompt import Encoder
from localmoe.chat.prompt_cache import PromptCache
from localmoe.chat.session import Session
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.engine.images import EngineImages
from localmoe.engine.loading import EngineParts
from localmoe.hardware.cpu import ram_bytes
from localmoe.hardware.host_room import texts_room


class EngineSession:
    """The text that a loaded model holds, and its pictures."""

    def __init__(self, parts: EngineParts, config: EngineConfig, encoder: Encoder) -> None:
        """encoder: of its prompts. What is made up to be measured keeps no other texts."""
        limit, state = config.prompt_cache_bytes, parts.runner.sequence
        kept = limit != 0 and parts.passes.synthetic is None
        cache = PromptCache(lambda held: texts_room(*ram_bytes(), held, limit)) if kept else None
        self.text = Session(state, cache)
        self._images = EngineImages.of_engine(parts, encoder.images, cache)

    def begin(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        stop: threading.Event | None,
        *,
        exact: bool,
    ) -> int:
        """See Session.begin; pictures that the passes need are read, unless `stop` is set.

        Raises as EngineImages.read."""
        if self._images is None:
            return self.text.begin(prompt, exact=exact)
        held = self.text.begin(self._images.begin(request, prompt), exact=exact)
        self._images.read(len(prompt), held, stop)
        return held

    def close(self) -> None:
        """Drop everything."""
        self.text.forget()
        if self._images is not None:
            self._images.close()
        self._images = None
