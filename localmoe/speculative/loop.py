"""The speculative loop on one page: prefill, then draft, verify, accept, roll back, until something ends
the answer.

Every emitted token is the target's choice: greedily its argmax, with sampling a draw from its distribution.
The draft only proposes. Whatever closes the generator, the sequence state ends up holding exactly the
emitted tokens but the last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from localmoe.core.events import DraftFinished, PrefillStarted, StepFinished, StepStarted
from localmoe.core.stream import FinishReason
from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.model.runner import ModelRunner
from localmoe.speculative.acceptance import Verdict, accept_greedy, accept_sampled
from localmoe.speculative.drafters import Drafter, Proposal
from localmoe.speculative.governor import Governor
from localmoe.speculative.sampling import TokenSampler


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens that a step emitted, how many of them were drafted, and why the answer ends here (None: it
    goes on)."""

    tokens: list[int]
    from_draft: int
    finish_reason: FinishReason | None


class SpeculativeLoop:
    """Everything that one answer needs; `drafter` None is plain decoding."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        governor: Governor,
        sampler: TokenSampler,
        end_tokens: frozenset[int],
        stop: threading.Event | None,
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._governor = governor
        self._sampler = sampler
        self._end_tokens = end_tokens
        self._stop = stop
        self._counters = runner.passes.counters
        self._longest_draft = (
            runner.passes.rows.max_rows - 1
        )  # a longer window might change a token's last bits

    def run(self, prompt: Sequence[int], max_new_tokens: int) -> Iterator[StepResult]:
        """Generate at most `max_new_tokens` after `prompt`, of which the sequence state holds a prefix
        already."""
        history = list(prompt)
        logits = self._prefill(history)
        if logits is None:
            yield StepResult([], 0, "cancelled")
            return
        yield self._emit(history, [self._first_token(logits, history)], 0, max_new_tokens)
        while len(history) - len(prompt) < max_new_tokens and history[-1] not in self._end_tokens:
            if self._stop is not None and self._stop.is_set():
                yield StepResult([], 0, "cancelled")
                return
            room = max_new_tokens - (len(history) - len(prompt))
            yield self._step(history, room)

    def _step(self, history: list[int], room: int) -> StepResult:
        """Draft g tokens, verify g + 1 in one target pass, keep what the target agrees with plus its next
        token."""
        runner, counters = self._runner, self._counters
        base = runner.sequence.length
        assert base == len(history) - 1, "the state holds all tokens but the last"
        try:
            proposal, draft_s = self._draft(
                history, min(self._governor.choose(), room - 1, self._longest_draft)
            )
            started = time.perf_counter()
            # verify: row i of the logits is the target's view of what follows history + drafted[:i]
            logits = runner.run([history[-1], *proposal.tokens], "verify", last_only=False)
            verdict = self._accept(logits, history, proposal)
            runner.sequence.truncate(base + 1 + verdict.accepted)
        except BaseException:
            runner.rewind(base)
            raise
        verify_s = time.perf_counter() - started
        drafted = len(proposal.tokens)
        runner.passes.scheduler.notify(StepFinished(drafted, verdict.accepted))
        self._governor.observe(drafted, verdict.accepted, draft_s, verify_s)
        counters.steps += 1
        counters.drafted += drafted
        counters.accepted += verdict.accepted
        counters.draft_s += draft_s
        counters.verify_s += verify_s
        return self._emit(
            history, [*proposal.tokens[: verdict.accepted], verdict.token], verdict.accepted, room
        )

    def _draft(self, history: list[int], length: int) -> tuple[Proposal, float]:
        passes = self._runner.passes
        passes.lookahead.clear()
        passes.scheduler.notify(StepStarted(self._counters.steps, length))
        if self._drafter is None or length == 0:
            return Proposal([], []), 0.0
        started = time.perf_counter()
        proposal = self._drafter.propose(history, length, self._sampler, self._stop)
        passes.scheduler.notify(DraftFinished(len(proposal.tokens)))
        return proposal, time.perf_counter() - started

    def _accept(self, logits: Tensor, history: list[int], proposal: Proposal) -> Verdict:
        sampler, drafted = self._sampler, proposal.tokens
        if sampler.config.greedy:
            return accept_greedy(sampler.greedy_choices(logits, history, drafted), drafted)
        return accept_sampled(
            target=lambda i: sampler.distribution(logits[i], [*history, *drafted[:i]]),
            draft=proposal.distributions,
            drafted=drafted,
            uniform=sampler.uniform,
            draw=sampler.draw,
        )

    def _prefill(self, prompt: list[int]) -> Tensor | None:
        """Run what the sequence state does not hold yet; logits (1, V) of the last token, or None when
        stopped."""
        runner = self._runner
        logits = None
        for start in range(runner.sequence.length, len(prompt), PREFILL_CHUNK):
            if self._stop is not None and self._stop.is_set():
                return None
            chunk = prompt[start : start + PREFILL_CHUNK]
            runner.passes.scheduler.notify(PrefillStarted(len(chunk)))
            logits = runner.run(chunk, "prefill", last_only=True)
        assert logits is not None, "at least the last prompt token has to run"
        return logits

    def _first_token(self, logits: Tensor, history: list[int]) -> int:
        if self._sampler.config.greedy:
            return self._sampler.greedy_choices(logits, history, ())[0]
        return self._sampler.draw(self._sampler.distribution(logits[0], history))

    def _emit(self, history: list[int], tokens: list[int], accepted: int, room: int) -> StepResult:
        """Append tokens up to the first end token or the limit, and say why the answer ends, if it does."""
        kept: list[int] = []
        reason: FinishReason | None = None
        for token in tokens[:room]:
            kept.append(token)
            if token in self._end_tokens:
                reason = "stop"
                break
        if reason is None and len(kept) == room:
            reason = "length"
        history.extend(kept)
        if len(kept) < len(tokens):  # the state must not run ahead of the text
            self._runner.sequence.truncate(len(history) - 1)
        self._counters.new_tokens += len(kept)
        return StepResult(kept, min(accepted, len(kept)), reason)
