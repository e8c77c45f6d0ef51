"""Is an answer faster with the draft in VRAM, or with experts in its place? Drafting is timed while it goes
on. What decoding without it would reach, once the draft's memory holds experts, is bounded from a few plain
steps, then tried, and measured. Moves nothing (engine.draft_place does); no answer depends on it.

The bound: with more slots the share of demands that miss falls, and along a convex curve, for the experts
that enter first are the ones used most. So S' slots in the place of S, of N experts, spare at least the share
(S' - S) / (N - S) of the misses, and of the time that they cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from localmoe.core.gates import Gate
from localmoe.core.stats import GenerationCounters
from localmoe.speculative.governor import Governor
from localmoe.speculative.step_record import StepRecord

_SETTLE_STEPS = 40  # after a move: slots are empty, and the governor tries lengths until they are full
_SETTLE_PLAIN_STEPS = 48  # likewise, where a step is one token and slots are many
_LEAST_STEPS, _RECENT_STEPS = 32, 128  # that a rate is taken from
_PROBE_STEPS = 9  # plain steps in a row; the first still has drafting's experts on their way
_PROBE_AGAIN_STEPS = 512  # later, since texts differ
_BETTER, _WORSE = 1.1, 0.95  # of the other's rate, from which on something is moved: both were measured


class DraftWorth:
    """What is known of a loaded model at one size of budget.

    Attributes:
        aside: whether the draft is out of VRAM.
        drafted_per_s: tokens a second while it was in VRAM; None until that is known.
        plain_per_s: and while it was not.
        bound_per_s: what plain decoding would reach at least; None until a probe has ended.
        judged: the rate of where the draft is now was measured since it is there, or by an earlier run.
            Requests that ask for the draft bring it back at once; it does not leave again between them.
    """

    def __init__(
        self, spared: float, drafted_per_s: float | None = None, plain_per_s: float | None = None
    ) -> None:
        """
        Args:
            spared: (S' - S) / (N - S), the share of misses that the draft's memory spares; 0: it holds no
                further expert.
            drafted_per_s, plain_per_s: what an earlier run measured, if any did.
        """
        assert 0.0 <= spared <= 1.0, spared
        self.aside = False
        self.drafted_per_s = drafted_per_s
        self.plain_per_s = plain_per_s
        self.bound_per_s: float | None = None
        self._spared = spared
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._settling = _SETTLE_STEPS
        self._since_probe = 0
        self.judged = drafted_per_s is not None and plain_per_s is not None

    def moved(self, *, aside: bool) -> None:
        """The draft left VRAM, or is back."""
        self.aside, self.judged = aside, False
        self._recent.clear()
        self._settling = _SETTLE_PLAIN_STEPS if aside else _SETTLE_STEPS

    @property
    def wants_probe(self) -> bool:
        """Whether plain steps are needed for the bound."""
        if self.aside or not self._spared or self.drafted_per_s is None or self.plain_per_s is not None:
            return False
        return self.bound_per_s is None or self._since_probe >= _PROBE_AGAIN_STEPS

    @property
    def wants_aside(self) -> bool:
        """Whether the next answer will be faster without the draft in VRAM, or may be: then it is tried."""
        if self.aside or not self._spared or self.drafted_per_s is None or not self.judged:
            return False
        if self.plain_per_s is not None:
            return self.plain_per_s > _BETTER * self.drafted_per_s
        return self.bound_per_s is not None and self.bound_per_s > self.drafted_per_s

    @property
    def wants_back(self) -> bool:
        """Whether it turned out that drafting is faster."""
        if not self.aside or not self.judged or self.plain_per_s is None or self.drafted_per_s is None:
            return False
        return self.plain_per_s < _WORSE * self.drafted_per_s

    def note(self, tokens: int, seconds: float) -> None:
        """A step that was no probe's."""
        if self._settling:
            self._settling -= 1
            return
        self._since_probe += 1
        self._recent.append((tokens, seconds))
        if len(self._recent) >= _LEAST_STEPS:
            self.judged = True
            rate = sum(n for n, _ in self._recent) / max(1e-9, sum(s for _, s in self._recent))
            if self.aside:
                self.plain_per_s = rate
            else:
                self.drafted_per_s = rate

    def note_probe(self, step_s: float, missed_s: float) -> None:
        """A plain step takes `step_s`, of which what is missing costs `missed_s`."""
        self._since_probe = 0
        self.bound_per_s = 1.0 / max(1e-9, step_s - self._spared * min(missed_s, step_s))


class WatchedGovernor:
    """A governor of which a DraftWorth hears, for one answer."""

    def __init__(
        self, inner: Governor, worth: DraftWorth, counters: GenerationCounters, miss_s: Callable[[], float]
    ) -> None:
        """counters: the answer's. miss_s: seconds that one missing expert costs a plain step."""
        self._inner, self._worth, self._counters, self._miss_s = inner, worth, counters, miss_s
        self._probed: list[float] = []  # seconds of each plain step
        self._missed = 0  # before the second of them

    def choose(self) -> int:
        """0 while plain steps are needed, else the inner one's choice."""
        return 0 if self._worth.wants_probe else self._inner.choose()

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        """Likewise."""
        return (0, None) if self._worth.wants_probe else self._inner.choose_gated(most)

    def observe(self, step: StepRecord) -> None:
        """Tell both; of what was looked up the inner one alone, since it takes no draft."""
        self._inner.observe(step)
        if step.found or (self._worth.aside and step.drafted):
            return
        if not self._worth.wants_probe:
            self._worth.note(step.tokens, step.took_s)
        elif not step.drafted:
            self._probe(step.verify_s + step.host_s)

    def instead(self, margins: Sequence[float]) -> int:
        """None while plain steps are needed, else as the inner one."""
        return 0 if self._worth.wants_probe else self._inner.instead(margins)

    def _probe(self, seconds: float) -> None:
        missed = self._counters.misses + self._counters.computed + self._counters.late
        if not self._probed:
            self._missed = missed
        self._probed.append(seconds)
        if len(self._probed) == _PROBE_STEPS:
            steps = self._probed[1:]
            misses = (missed - self._missed) / len(steps)
            self._worth.note_probe(sum(steps) / len(steps), misses * self._miss_s())
