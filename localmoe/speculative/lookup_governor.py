"""How much of what was looked up in the text is verified. Looking up takes no time, so every step does it; a
further row of the verify pass does, so it has to be worth that (`draft_gate`), by how often such tokens were
right: the more tokens agree before one, the likelier it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from localmoe.core.gates import Gate
from localmoe.speculative.draft_gate import DraftGate
from localmoe.speculative.margin_rates import MarginRates
from localmoe.speculative.step_record import StepRecord
from localmoe.speculative.verify_times import HostTimes, VerifyTimes

# rates before any evidence, by the classes of margin_rates, of which the first two are of tokens that are
# never proposed
FIRST_GUESS = (0.2, 0.2, 0.3, 0.45, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95, 0.95)
LONGER = 2  # times the longest window measured, which a step may become
_LEAST_MOST = 3  # looked-up tokens that any step may verify
_SPEED_STEPS, _EASED = 64, 0.9  # that the speed which a step has to keep up is taken from, and how much of it
_TRY_AGAIN = 32  # proposals in a row that were not worth a row each, after which one is verified all the same


class LookupGovernor:
    """Maximises expected tokens a second of prompt lookup, and is the gate of its steps. Keeps what it learnt
    across answers."""

    def __init__(self, max_draft_length: int) -> None:
        self._longest = max_draft_length
        self._times, self._host = VerifyTimes(), HostTimes()
        self._rates = MarginRates(FIRST_GUESS)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_SPEED_STEPS)  # tokens and seconds of steps
        self._left_out = 0  # proposals in a row

    def choose(self) -> int:
        """0: only what says how many tokens agree is verified."""
        return 0

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        """Up to twice the longest window so far, of which `worth_verifying` takes a part. The first step says
        what a pass over one token takes."""
        if not self._recent:
            return 0, None
        if self._left_out >= _TRY_AGAIN:
            return min(1, most), None
        return min(most, self._longest, max(_LEAST_MOST, LONGER * self._times.longest)), self

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        """Always."""
        return True

    def worth_verifying(self, margins: Sequence[float]) -> int:
        """How many of the looked-up tokens with these margins to put to the target. Most steps find none, and
        compare nothing."""
        if not margins:
            return 0
        seconds = self._times.fitted(len(margins) + 1) + self._host.of(len(margins) + 1)
        tokens, took_s = (sum(column) for column in zip(*self._recent, strict=True))
        speed = max(1.0 / max(1e-9, float(seconds[0])), _EASED * tokens / max(1e-9, took_s))
        return DraftGate(self._rates, 0.0, seconds, speed).worth_verifying(margins)

    def observe(self, step: StepRecord) -> None:
        """Learn from a step that verified some of what was looked up."""
        self._times.observe(step.drafted + 1, step.verify_s)
        self._host.observe(step.drafted + 1, step.host_s)
        self._rates.observe(step.margins, step.drafted, step.accepted)
        self._recent.append((step.tokens, step.took_s))
        if step.drafted:
            self._left_out = 0
        elif step.margins:
            self._left_out += 1

    def instead(self, margins: Sequence[float]) -> int:
        """None: there is no draft whose place it would be."""
        return 0
