"""One speculative step: draft, verify, accept, roll back. Two ways: pass by pass with the host in between,
which takes any drafter; and whole on the GPU, with the model's own draft or MTP layer, what was looked up, or
nothing. Decides no draft length and emits nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from localmoe.core.events import DraftFinished, StepFinished, StepStarted
from localmoe.core.gates import Gate
from localmoe.kernels.choices import check_chosen
from localmoe.model.runner import PassRunner
from localmoe.model.synthetic import SyntheticGate, SyntheticModel
from localmoe.speculative.acceptance import Verdict, accept_drawn, accept_greedy, accept_sampled
from localmoe.speculative.drafters import Drafter, Proposal
from localmoe.speculative.found_instead import FoundInstead
from localmoe.speculative.prompt_lookup import PromptLookupDrafter
from localmoe.speculative.sampling import TokenSampler

if TYPE_CHECKING:  # needs Triton
    from localmoe.model.device_steps import DeviceSteps


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step drafted, how many of those are kept, what the target agreed to besides, its own token after
    them, and how long it took. verified: whether the target had a say in what is kept."""

    drafted: list[int]
    accepted: int
    token: int
    draft_s: float
    verify_s: float
    verified: bool = True
    margins: Sequence[float] = ()  # of all that was drafted, verified or not; (): nobody knows them
    besides: Sequence[int] = ()  # tokens that nobody drafted, between the kept ones and `token`
    found: bool = False  # `drafted` was looked up in the text, in the place of a draft

    @property
    def tokens(self) -> list[int]:
        """All that the answer gets."""
        return [*self.drafted[: self.accepted], *self.besides, self.token]


class Stepper(Protocol):
    """Advances the sequence by the accepted tokens plus one, and tells the policy of it. A step has two
    halves, so that the GPU drafts while the caller handles the text of the step before."""

    @property
    def hears_margins(self) -> bool:
        """Whether drafts can be ended by what they say of themselves."""

    def begin(self, history: Sequence[int], length: int, *, room: int, gate: Gate | None = None) -> None:
        """Start to draft at most `length` tokens after `history`, of which the sequence holds all but the
        last. By the time that it returns, all that the step before did has been counted. room: tokens that
        the answer may still get. gate: what ends the drafts, for a stepper that hears margins."""

    def finish(self) -> StepOutcome:
        """The step that was begun. An exception, here or in `begin`, leaves the sequence as it was."""

    def close(self) -> None:
        """There is no further step: drop one that was begun, count what the last one did."""


class PassStepper:
    """Draft token by token, verify, decide on the host."""

    def __init__(
        self,
        runner: PassRunner,
        drafter: Drafter | None,
        sampler: TokenSampler,
        stop: threading.Event | None,
        instead: FoundInstead | None = None,
    ) -> None:
        """instead: finds tokens that take the place of what the drafter would propose."""
        self._runner = runner
        self._drafter = drafter
        self._sampler = sampler
        self._stop = stop
        self._instead = instead
        self._history: Sequence[int] = ()
        self._length = self._room = 0
        self._gate: Gate | None = None

    @property
    def hears_margins(self) -> bool:
        """As the drafter tells them."""
        return self._drafter is not None and self._drafter.tells_margins

    def begin(self, history: Sequence[int], length: int, *, room: int, gate: Gate | None = None) -> None:
        """Nothing runs yet: every pass needs the host."""
        passes = self._runner.passes
        self._history, self._length, self._room, self._gate = history, length, room, gate
        passes.lookahead.clear()
        passes.scheduler.notify(StepStarted(passes.counters.steps, length))

    def finish(self) -> StepOutcome:
        """Draft g tokens, verify g + 1 in one target pass, keep what the target agrees with plus its next
        token."""
        runner, history = self._runner, self._history
        base = runner.sequence.length
        try:
            instead = None if self._instead is None else self._instead.find(history, self._room)
            if instead is None:
                proposal, draft_s = self._draft(history, self._length)
            else:
                proposal, draft_s = instead, 0.0
                runner.passes.scheduler.notify(DraftFinished(len(proposal.tokens), looked_up=True))
            captured_s, started = runner.capture_s, time.perf_counter()
            # verify: row i of the logits is the target's view of what follows history + drafted[:i]
            logits = runner.run([history[-1], *proposal.tokens], "verify", last_only=False)
            verdict = self._accept(logits, history, proposal)
            runner.sequence.truncate(base + 1 + verdict.accepted)
        except BaseException:
            runner.rewind(base)
            raise
        ended = time.perf_counter()
        verify_s = ended - started - (runner.capture_s - captured_s)
        if runner.passes.timeline is not None:
            name = f"verify {len(proposal.tokens) + 1} tokens, keep {verdict.accepted + 1}"
            runner.passes.timeline.add("verify", name, started, ended)
        runner.passes.scheduler.notify(StepFinished(len(proposal.tokens), verdict.accepted))
        return StepOutcome(
            proposal.tokens, verdict.accepted, verdict.token, draft_s, verify_s, margins=proposal.margins,
            found=instead is not None,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing runs beside the host."""

    def _draft(self, history: Sequence[int], length: int) -> tuple[Proposal, float]:
        if self._drafter is None or length == 0:
            return Proposal([], []), 0.0
        captured_s, started = self._runner.capture_s, time.perf_counter()
        gate, synthetic = self._gate, self._runner.passes.synthetic
        if synthetic is None or not synthetic.simulates_acceptance:
            proposal = self._drafter.propose(history, length, self._sampler, self._stop, gate)
        else:  # positions of drafted tokens begin behind the text
            heard = None if gate is None else SyntheticGate(gate, synthetic, len(history))
            proposal = self._drafter.propose(history, length, self._sampler, self._stop, heard)
            proposal.margins[:] = synthetic.margins(len(history), len(proposal.margins))
        if gate is not None:
            proposal.cut(self._kept(proposal, length, gate))
        finished = DraftFinished(len(proposal.tokens), looked_up=proposal.looked_up)
        self._runner.passes.scheduler.notify(finished)
        ended = time.perf_counter()
        if self._runner.passes.timeline is not None:
            name = f"draft {len(proposal.tokens)} tokens"
            self._runner.passes.timeline.add("draft", name, started, ended)
        return proposal, ended - started - (self._runner.capture_s - captured_s)

    def _kept(self, proposal: Proposal, length: int, gate: Gate) -> int:
        """How much of a proposal is verified. Of what was drawn only the last token may be left out, and only
        where drafting ended there whatever was drawn: margins after a token depend on it, and leaving it out
        by them would change the distribution of what is kept."""
        kept, drafted = gate.worth_verifying(proposal.margins), len(proposal.tokens)
        if not proposal.distributions:
            return kept
        ended = drafted == length or not gate.goes_on(proposal.margins)
        return max(kept, drafted - ended)

    def _accept(self, logits: Tensor, history: Sequence[int], proposal: Proposal) -> Verdict:
        sampler, drafted = self._sampler, proposal.tokens
        synthetic = self._runner.passes.synthetic
        if synthetic is not None and synthetic.simulates_acceptance:
            return self._accept_synthetic(synthetic, logits, history, drafted)
        if sampler.config.greedy:
            verdict = accept_greedy(sampler.greedy_choices(logits, history, drafted), drafted)
            check_chosen([verdict.token])
            return verdict

        def target(i: int) -> Tensor:
            return sampler.distribution(logits[i], [*history, *drafted[:i]])

        if not proposal.distributions:
            return accept_drawn(target, drafted, sampler.draw)
        return accept_sampled(target, proposal.distributions, drafted, sampler.uniform, sampler.draw)

    def _accept_synthetic(
        self, synthetic: SyntheticModel, logits: Tensor, history: Sequence[int], drafted: list[int]
    ) -> Verdict:
        """What the simulation accepts, then the target's choice after it."""
        accepted = synthetic.accepted(len(history), len(drafted))
        return Verdict(accepted, self._sampler.next_token(logits[accepted], [*history, *drafted[:accepted]]))


class DeviceStepper:
    """Steps that the GPU runs from the first drafted token to the target's choices. Drafted tokens are kept
    while they are those choices: sampled tokens too are a function of the logits there (kernels.choices)."""

    def __init__(
        self,
        steps: DeviceSteps,
        end_tokens: frozenset[int],
        lookup: PromptLookupDrafter | None = None,
        instead: FoundInstead | None = None,
    ) -> None:
        """lookup: proposes tokens where the model has no draft. instead: finds some that take the place of
        what that would propose."""
        assert lookup is None or instead is None, "either there is a draft or there is none"
        self._steps = steps
        self._end_tokens = end_tokens
        self._lookup, self._instead = lookup, instead
        self._margins: Sequence[float] | None = None  # of what was looked up for the step; None: it drafts

    @property
    def hears_margins(self) -> bool:
        """Of the model's own draft not where the verify pass is issued behind the drafts at once."""
        return self._lookup is not None or self._steps.may_stop

    def begin(self, history: Sequence[int], length: int, *, room: int, gate: Gate | None = None) -> None:
        """The GPU drafts, and verifies too where the host has nothing to decide in between. What is looked up
        waits for the next step where this one runs already."""
        proposal = self._look_up(history, length, room, gate)
        if proposal is None:
            self._margins = None
            self._steps.begin(history, length, room=room, gate=gate)
            return
        proposed = proposal.tokens
        verified = self._steps.begin(history, len(proposed), room=room, proposed=proposed)
        self._margins = proposal.margins if verified else ()

    def _look_up(self, history: Sequence[int], length: int, room: int, gate: Gate | None) -> Proposal | None:
        """What to verify without a draft; None: draft."""
        if self._lookup is None:
            return None if self._instead is None else self._instead.find(history, room)
        proposal = self._lookup.look_up(history, length) if length else Proposal([], [])
        if gate is not None:
            proposal.cut(gate.worth_verifying(proposal.margins))
        return proposal

    def finish(self) -> StepOutcome:
        """Read back once. What was drafted after an end token does not count."""
        done = self._steps.finish()
        ends = (i + 1 for i, token in enumerate(done.drafted) if token in self._end_tokens)
        counted = next(ends, len(done.drafted))
        margins = done.margins if self._margins is None else self._margins
        if counted < len(done.drafted):
            margins = margins[:counted]
        return StepOutcome(
            done.drafted[:counted], min(done.accepted, counted), done.token, done.draft_s, done.verify_s,
            margins=margins, found=self._instead is not None and self._margins is not None and counted > 0,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for what still runs."""
        self._steps.close()
