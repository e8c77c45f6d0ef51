"""What is known of one step on the GPU: under way, and when it is over. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from localmoe.core.gates import Gate
from localmoe.core.timeline import Timeline
from localmoe.experts.copy_times import CopyTimes
from localmoe.model.device_clock import Clock, Landing
from localmoe.model.device_runner import PendingWindow
from localmoe.model.window_report import WindowReport


@dataclass(frozen=True, slots=True)
class Speculation:
    """A step: what was drafted and verified, how much of it the target chose too, its own choice after that,
    seconds, less those in which passes were captured: that happens once; and the margins of all that was
    drafted, as far as the host heard of them."""

    drafted: list[int]
    accepted: int
    token: int
    draft_s: float
    verify_s: float
    margins: list[float]


@dataclass(slots=True)
class Step:
    """A step under way: its first token (None: the step before is still to choose it), how many tokens it
    drafts at most, its draft passes' reports and, once it was issued, its verify pass's."""

    token: int | None
    start: int
    count: int
    clock: Clock
    drafts: list[Landing]
    gate: Gate | None = None
    window: PendingWindow | None = None
    timeline: Timeline | None = None
    captures_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of its drafts, of its verify pass
    margins: list[float] = field(default_factory=list)  # of the tokens whose reports are in
    prepared: int | None = None  # drafted tokens for which its verify pass was prepared last, the most so far
    draft_marks: int = 0  # of the clock, behind drafts
    behind: bool = False  # its verify pass was issued behind another one: the GPU waited for nobody

    @property
    def in_parts(self) -> bool:
        """Whether each draft pass has a time of its own."""
        return self.timeline is not None or self.gate is not None

    def mark_drafts(self) -> None:
        """The drafts issued so far end here."""
        self.clock.tick()
        self.draft_marks += 1

    def tell(self, seconds: list[float], ended: float, kept: int, copies: CopyTimes | None) -> None:
        """Lay what the GPU's clock measured on the host's, for a timeline if there is one.

        Args:
            seconds: of each draft, of waiting for the host's decision, of the verify pass.
            ended: when the host heard of its end.
            copies: that ran meanwhile.
        """
        if self.timeline is None:
            return
        began = self.clock.began
        began_s = began if isinstance(began, float) else ended - sum(seconds)
        at = began_s
        for token, took in enumerate(seconds[: len(self.drafts)], start=1):
            self.timeline.add("draft", f"token {token}", at, at + took)
            at += took
        at = began_s + sum(seconds[:-1])
        self.timeline.add("verify", f"verify {self.count + 1} tokens, keep {kept}", at, at + seconds[-1])
        if copies is not None:
            copies.place(self.timeline, began, began_s)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose books are still open. draft_token_s: of its draft passes; None: it had none, or one was
    captured."""

    report: WindowReport
    accepted: int
    draft_token_s: float | None
