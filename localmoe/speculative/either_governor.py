"""Whether a step drafts or verifies what was looked up in the text, where there is a draft and answers' texts
may quote: looking up takes no time and may foretell dozens of tokens, or none. How long drafts are is another
governor's, as if nothing were ever looked up.

A text is as long as it is, so its time is least where each part takes the way that is faster there: what was
looked up is worth it if its tokens come faster than steps with drafts lately brought theirs (`draft_gate`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from localmoe.core.gates import Gate
from localmoe.speculative.draft_gate import DraftGate
from localmoe.speculative.governor import Governor
from localmoe.speculative.lookup_governor import FIRST_GUESS, LONGER
from localmoe.speculative.margin_rates import MarginRates
from localmoe.speculative.step_record import StepRecord
from localmoe.speculative.verify_times import HostTimes, VerifyTimes

_OTHER_STEPS = 32  # whose speed looked-up tokens have to beat
_KNOWN_STEPS = 8  # of these, before which nothing is compared: the first ones meet empty slots
_FIRST_MOST = 6  # looked-up tokens of the first step that verifies any
_TRY_AGAIN = 256  # proposals in a row that were not worth it, after which one is verified all the same


class EitherGovernor:
    """Another one's draft lengths, and how much of what is looked up takes a draft's place. Keeps what it
    learnt across answers."""

    def __init__(self, drafts: Governor, max_draft_length: int) -> None:
        """drafts: chooses lengths where nothing is looked up."""
        self._drafts, self._longest = drafts, max_draft_length
        self._times, self._host = VerifyTimes(), HostTimes()  # of steps that verify what was looked up
        self._rates = MarginRates(FIRST_GUESS)
        self._others: deque[tuple[int, float]] = deque(maxlen=_OTHER_STEPS)  # tokens and seconds
        self._left_out = 0  # proposals in a row

    def choose(self) -> int:
        """As the other one."""
        return self._drafts.choose()

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        """As the other one."""
        return self._drafts.choose_gated(most)

    def instead(self, margins: Sequence[float]) -> int:
        """How many looked-up tokens with these margins to verify in the place of a draft; 0: draft. What a
        pass over them takes is known once one was tried; until then it is what a step with drafts takes."""
        if not margins or len(self._others) < _KNOWN_STEPS:
            return 0
        if self._left_out >= _TRY_AGAIN:
            return 1
        tokens, took_s = (sum(column) for column in zip(*self._others, strict=True))
        speed, longest = tokens / max(1e-9, took_s), self._times.longest
        margins = margins[: min(self._longest, LONGER * longest if longest else _FIRST_MOST)]
        rows = len(margins) + 1
        seconds = np.full(rows, took_s / len(self._others))
        if longest:
            seconds = self._times.fitted(rows) + self._host.of(rows)
        count, worth = DraftGate(self._rates, 0.0, seconds, speed).best(margins)
        if count and worth > 0.0:
            return count
        self._left_out += 1
        return 0

    def observe(self, step: StepRecord) -> None:
        """Learn from a step, or have the other one learn from it."""
        if not step.found:
            self._others.append((step.tokens, step.took_s))
            self._drafts.observe(step)
            return
        self._left_out = 0
        self._times.observe(step.drafted + 1, step.verify_s)
        self._host.observe(step.drafted + 1, step.host_s)
        self._rates.observe(step.margins, step.drafted, step.accepted)
