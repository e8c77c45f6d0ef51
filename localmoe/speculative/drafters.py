"""Who proposes tokens: the protocol, and the INT4 self-draft that shares weights and KV cache with the
target. Does not decide how many are proposed, nor which are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from localmoe.model.runner import PassRunner
from localmoe.speculative.sampling import TokenSampler


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens and, when sampling, the distribution (V,) that each was drawn from (empty when
    greedy)."""

    tokens: list[int]
    distributions: list[Tensor]

    def add(self, logits: Tensor, text: Sequence[int], sampler: TokenSampler) -> int:
        """Choose the token after `text` from the draft's logits (1, V), as the target would from its own."""
        if sampler.config.greedy:
            token = sampler.greedy_choices(logits, text, ())[0]
        else:
            q = sampler.distribution(logits[0], text)
            token = sampler.draw(q)
            self.distributions.append(q)
        self.tokens.append(token)
        return token


class Drafter(Protocol):
    """Proposes up to `count` tokens that may follow `history`, leaving the sequence state as it found it."""

    def propose(
        self, history: Sequence[int], count: int, sampler: TokenSampler, stop: threading.Event | None
    ) -> Proposal:
        """`history` ends with a token that the sequence state does not hold yet."""


class SelfDrafter:
    """The model itself with its INT4 experts, one token at a time."""

    def __init__(self, runner: PassRunner, end_tokens: frozenset[int], *, whole_window: bool = False) -> None:
        """whole_window: see core.switches."""
        self._runner = runner
        self._end_tokens = end_tokens
        self._whole_window = whole_window

    def propose(
        self, history: Sequence[int], count: int, sampler: TokenSampler, stop: threading.Event | None
    ) -> Proposal:
        """Draft until `count` tokens, an end token, or `stop`; the draft's keys and values are dropped at
        the end."""
        runner, base = self._runner, self._runner.sequence.length
        proposal = Proposal([], [])
        token = history[-1]
        try:
            for position in range(count):
                if stop is not None and stop.is_set():
                    break
                runner.begin_draft_token(position)
                started = time.perf_counter()
                logits = runner.run([token], "draft", last_only=True)
                if runner.passes.timeline is not None:
                    runner.passes.timeline.add("draft", f"token {position + 1}", started)
                token = proposal.add(logits, [*history, *proposal.tokens], sampler)
                if token in self._end_tokens:
                    break
            else:
                if self._whole_window and count:
                    runner.begin_draft_token(count)
                    runner.run([token], "draft", last_only=True)
        finally:
            runner.sequence.truncate(base)
        return proposal
