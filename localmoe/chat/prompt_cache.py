"""Texts that a sequence state has held before, in host RAM: other chats, other clients of the API, earlier
versions of a message. Going back to one prefills only what is new. Runs nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.model.runner import SequenceState
from localmoe.model.sequence_copy import SequenceCopy, lacks_memory

_LOG = logging.getLogger(__name__)
# copying a text takes about as long as prefilling so many tokens, or such a share of its own
LEAST_TOKENS = 64
_LEAST_SHARE = 1 / 8
Tokens = NDArray[np.int64]


def shared_prefix(one: Tokens, other: Tokens) -> int:
    """With how many equal tokens two texts begin."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


def is_worth_copying(spared: int, length: int) -> bool:
    """Whether so many tokens that need not be prefilled are worth to copy a text of that length."""
    return spared >= max(LEAST_TOKENS, _LEAST_SHARE * length)


@dataclass(frozen=True, slots=True)
class KeptText:
    """Tokens, and what the state held of them. exact: see Session.begin."""

    tokens: Tokens
    copy: SequenceCopy
    exact: bool

    def reusable(self, prompt: Tokens) -> int:
        """How many tokens of a prompt are had by bringing it back."""
        return self.copy.keepable(shared_prefix(self.tokens, prompt))


class PromptCache:
    """The texts that were left last, as many as there is room for; while two are exchanged, one more. For one
    thread."""

    def __init__(self, room: Callable[[int], int]) -> None:
        """room: bytes that may be held now, of which so many are held already."""
        self._room = room
        self._texts: list[KeptText] = []  # the one that was left last comes last

    @property
    def num_bytes(self) -> int:
        """Of host RAM."""
        return sum(text.copy.num_bytes for text in self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def keep(self, state: SequenceState, tokens: Tokens, *, exact: bool) -> None:
        """Copy what the state holds, which are these tokens, if there is room once the texts that were left
        longest ago are gone, and no text spares as much."""
        if any(text.reusable(tokens) == len(tokens) and text.exact >= exact for text in self._texts):
            return
        wanted, room = state.copy_bytes, self._room(self.num_bytes)
        if wanted > room:
            return
        others = [text for text in self._texts if not _goes_on(text, tokens, exact)]
        while others and sum(text.copy.num_bytes for text in others) + wanted > room:
            del others[0]
        self._texts = others
        try:
            self._texts.append(KeptText(tokens, state.copy_out(), exact))
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            _LOG.warning(
                "a text of %d tokens is not kept: %d bytes of RAM are not to be had", len(tokens), wanted
            )

    def take(self, prompt: Tokens, shared: int, *, exact: bool) -> KeptText | None:
        """The text that spares most of a prompt, if it is worth bringing back where `shared` tokens are had
        anyway. It is not kept any more."""
        usable = [text for text in self._texts if text.exact or not exact]
        found = max(usable, key=lambda text: text.reusable(prompt), default=None)
        if found is None or not is_worth_copying(found.reusable(prompt) - shared, found.copy.length):
            return None
        self._texts = [text for text in self._texts if text is not found]
        return found

    def clear(self) -> None:
        """Forget all."""
        self._texts = []


def _goes_on(text: KeptText, tokens: Tokens, exact: bool) -> bool:
    """Whether these tokens are that text, and more."""
    return exact >= text.exact and shared_prefix(text.tokens, tokens) == len(text.tokens)
