"""The reusable prefix of a conversation: which token ids the sequence state holds, and how much of a prompt
they cover. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from localmoe.model.runner import SequenceState


class Session:
    """Token ids behind one sequence state. A chat's next turn prefills only what is new."""

    def __init__(self, state: SequenceState) -> None:
        self._state = state
        self._tokens: list[int] = []
        self._exact = True

    def begin(self, prompt: Sequence[int], *, exact: bool = True) -> int:
        """Shorten the state to the longest prefix that it shares with the prompt, and can keep; returns that
        prefix's length.

        At least the last prompt token is left to run, since its logits are needed.

        Args:
            exact: nothing in this turn is summed in an order that depends on timing; such a turn builds on
                nothing that another one left.
        """
        held = self._tokens[: self._state.length] if self._exact or not exact else []
        self._exact = exact
        shared = 0
        for old, new in zip(held, prompt[:-1], strict=False):
            if old != new:
                break
            shared += 1
        shared = self._state.keepable(shared)
        self._state.truncate(shared)
        self._tokens = list(prompt)
        return shared

    def forget(self) -> None:
        """Drop everything."""
        self._state.truncate(0)
        self._tokens = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were emitted."""
        self._tokens.extend(tokens)
