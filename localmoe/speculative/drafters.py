"""Who proposes tokens: the protocol, and the INT4 self-draft that shares weights and KV cache with the
target. Does not decide how many are proposed (a governor does, and its gate), nor which are kept.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from localmoe.core.gates import Gate
from localmoe.model.runner import PassRunner
from localmoe.speculative.sampling import TokenSampler, margin_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, the distribution (V,) that each was drawn from (empty where none was drawn: greedily,
    and of a drafter that looks up), and how sure the draft was of each (speculative.margin_rates; empty of a
    drafter that cannot say). looked_up: no pass was run for them."""

    tokens: list[int]
    distributions: list[Tensor]
    margins: list[float] = field(default_factory=list)
    looked_up: bool = False

    def add(self, logits: Tensor, text: Sequence[int], sampler: TokenSampler) -> int | None:
        """Choose the token after `text` from the draft's logits (1, V), as the target would from its own.
        None: they are no numbers, so there is none."""
        if sampler.config.greedy:
            token, margin = sampler.first_choice(logits[0], text)
            if math.isnan(margin):
                return None
        else:
            q = sampler.distribution(logits[0], text)
            margin = margin_of(q.log())  # of the distribution alone: see draft_gate
            if math.isnan(margin):
                return None
            token = sampler.draw(q)
            self.distributions.append(q)
        self.margins.append(margin)
        self.tokens.append(token)
        return token

    def cut(self, count: int) -> None:
        """Propose the first `count` alone. Margins stay, for they say how frequent they are."""
        del self.tokens[count:], self.distributions[count:]


class Soundness:
    """Of a drafter in one answer. What it cannot propose changes no answer, so the answer goes on without."""

    def __init__(self) -> None:
        self.lost = False

    def lose(self) -> None:
        """What it computed were no numbers: it proposes nothing any more."""
        self.lost = True
        _LOG.warning(
            "What the draft computes are no numbers, so the rest of this answer is written without it; its "
            "files or the model's may be damaged: get them anew."
        )


class Drafter(Protocol):
    """Proposes up to `count` tokens that may follow `history`, leaving the sequence state as it found it.

    Attributes:
        tells_margins: whether its proposals have them.
    """

    @property
    def tells_margins(self) -> bool: ...

    def propose(
        self,
        history: Sequence[int],
        count: int,
        sampler: TokenSampler,
        stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:
        """`history` ends with a token that the sequence state does not hold yet. gate: says after each token
        whether to go on; None: always."""


class SelfDrafter:
    """The model itself with its INT4 experts, one token at a time."""

    tells_margins = True

    def __init__(self, runner: PassRunner, end_tokens: frozenset[int], *, whole_window: bool = False) -> None:
        """whole_window: see core.switches."""
        self._runner = runner
        self._end_tokens = end_tokens
        self._whole_window = whole_window
        self._sound = Soundness()

    def propose(
        self,
        history: Sequence[int],
        count: int,
        sampler: TokenSampler,
        stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:
        """Draft until `count` tokens, an end token, the gate, or `stop`; the draft's keys and values are
        dropped at the end."""
        runner, base = self._runner, self._runner.sequence.length
        proposal = Proposal([], [])
        if self._sound.lost:
            return proposal
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
                chosen = proposal.add(logits, [*history, *proposal.tokens], sampler)
                if chosen is None:
                    self._sound.lose()
                    break
                token = chosen
                if token in self._end_tokens or (gate is not None and not gate.goes_on(proposal.margins)):
                    break
            else:
                if self._whole_window and count:
                    runner.begin_draft_token(count)
                    runner.run([token], "draft", last_only=True)
        finally:
            runner.sequence.truncate(base)
        return proposal
