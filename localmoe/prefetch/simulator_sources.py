"""Windows for the simulator, from routing that is known position by position (simulated, or a recorded
trace). Simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localmoe.prefetch.simulator_types import Prompt, Window


class RoutedTokens(Protocol):
    """Routing and acceptance as functions of the position in an answer."""

    def begin(self, answer: int) -> None:
        """Answer number `answer` starts."""

    def target_window(self, start: int, count: int) -> NDArray[np.int64]:
        """(count, L, K) experts of positions from `start` on in the target."""

    def draft_window(self, start: int, count: int) -> NDArray[np.int64]:
        """The same in the draft."""

    def accepts(self, position: int) -> bool:
        """Whether a drafted token at this position is accepted."""


def windows(
    tokens: RoutedTokens,
    *,
    draft_length: int,
    answers: int,
    prompt_tokens: int,
    new_tokens: int,
    self_draft: bool = True,
    whole_window: bool = False,
    gate_accuracy: float = 0.85,
    seed: int = 0,
) -> Iterator[Prompt | Window]:
    """Answers of `new_tokens` tokens after prompts of `prompt_tokens`, in steps of a fixed draft length.

    Args:
        self_draft: the drafter routes experts (else it proposes tokens alone).
        whole_window: it routes its last token too (core.switches).
        gate_accuracy: share of (token, layer) for which the next layer's gate guesses the very experts; in
            the others one of them is another. The default is MoE-SpeQ's figure for a predictor one layer
            ahead (2.5).
    """
    for answer in range(answers):
        tokens.begin(answer)
        if prompt_tokens:
            yield Prompt(tokens.target_window(0, prompt_tokens).astype(np.int32))
        position, end = prompt_tokens, prompt_tokens + new_tokens
        guesser = np.random.default_rng((seed, answer))
        while position < end:
            length = min(draft_length, end - position - 1)
            target = tokens.target_window(position, length + 1).astype(np.int32)
            routed = length + (whole_window and length > 0) if self_draft else 0
            draft = tokens.draft_window(position, routed).astype(np.int32) if routed else target[:0]
            accepted = next((i for i in range(length) if not tokens.accepts(position + 1 + i)), length)
            even = np.full(draft.shape, 1.0 / target.shape[2], dtype=np.float32)
            yield Window(draft, even, target, accepted, _guess(guesser, target, gate_accuracy))
            position += accepted + 1


def _guess(generator: np.random.Generator, target: NDArray[np.int32], accuracy: float) -> NDArray[np.int32]:
    """The target's experts, of which one is another layer's choice where the guess is wrong."""
    wrong = generator.random(target.shape[:2]) >= accuracy
    place = generator.integers(0, target.shape[2], wrong.shape)
    replaced = wrong[..., None] & (np.arange(target.shape[2]) == place[..., None])
    other = np.roll(target, 1, axis=1)
    return np.where(replaced, other, target).astype(np.int32)
