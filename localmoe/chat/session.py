"""The reusable prefix of a conversation: which token ids the sequence state holds, and how much of a prompt
they cover. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from localmoe.chat.prompt_cache import PromptCache, Tokens, is_worth_copying, shared_prefix
from localmoe.core.errors import CheckpointError
from localmoe.model.runner import SequenceState

# tokens of a prompt's end that the next turn of the same chat may have otherwise: where a template has the
# answer begin, and no thoughts of earlier ones
_PROMPT_END = 10


class Session:
    """Token ids behind one sequence state. A chat's next turn prefills only what is new, and so does a text
    that is gone back to, as long as the cache has it."""

    def __init__(self, state: SequenceState, cache: PromptCache | None = None) -> None:
        """cache: of what the state held before; None: there is none."""
        self._state, self._cache = state, cache
        self._tokens: list[int] = []
        self._prompt_length = 0
        self._exact = True

    def begin(self, prompt: Sequence[int], *, exact: bool = True) -> int:
        """Shorten the state to the longest prefix that it shares with the prompt, and can keep; returns that
        prefix's length. A text of the cache that spares more is brought back first.

        At least the last prompt token is left to run, since its logits are needed.

        Args:
            exact: nothing in this turn is summed in an order that depends on timing; such a turn builds on
                nothing that another one left.
        """
        wanted = np.asarray(prompt[:-1], dtype=np.int64)
        held = np.asarray(self._tokens[: self._state.length], dtype=np.int64)
        agree = shared_prefix(held, wanted)
        shared = self._state.keepable(agree) if self._exact or not exact else 0
        if self._cache is not None:
            shared = self._exchange(self._cache, held, wanted, agree, shared, exact)
        self._state.truncate(shared)
        self._tokens, self._prompt_length, self._exact = list(prompt), len(prompt), exact
        return shared

    def _exchange(
        self, cache: PromptCache, held: Tokens, wanted: Tokens, agree: int, shared: int, exact: bool
    ) -> int:
        """Put away a text that is left, and bring back one that spares more than `shared` tokens, which the
        state has of what is wanted; how many it has then. agree: with how many equal tokens both begin."""
        found = cache.take(wanted, shared, exact=exact)
        leaves = found is not None or agree < min(self._prompt_length, len(held)) - _PROMPT_END
        if leaves and is_worth_copying(len(held) - agree, len(held)) and self._ends_with(held):
            cache.keep(self._state, held, exact=self._exact)
        if found is None:
            return shared
        self._state.bring_back(found.copy)
        return self._state.keepable(shared_prefix(found.tokens, wanted))

    def _ends_with(self, held: Tokens) -> bool:
        """Drop what the state holds behind these tokens, as a draft's answer, if it can be dropped."""
        if self._state.keepable(len(held)) < len(held):
            return False
        self._state.truncate(len(held))
        return True

    @contextmanager
    def sound(self) -> Iterator[None]:
        """Of an answer that ends since numbers are none, nothing stays."""
        try:
            yield
        except CheckpointError:
            self.forget()
            self._state.wipe()
            raise

    def forget(self) -> None:
        """Drop everything."""
        self._state.truncate(0)
        self._tokens, self._prompt_length = [], 0
        if self._cache is not None:
            self._cache.clear()

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were emitted."""
        self._tokens.extend(tokens)
