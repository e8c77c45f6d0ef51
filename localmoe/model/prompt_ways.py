"""How many tokens of a prompt the GPU takes in its next pass, and how their experts come. In a window, and in
a longer pass that asks, each layer brings those that its tokens chose, over the link and with the CPU's lane;
past a pass that streams, all come that are missing, over the link alone and ahead of need. Learns what either
takes. Runs nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK
from localmoe.model.pass_kinds import WINDOW_BUCKETS

WINDOW = WINDOW_BUCKETS[-1]  # tokens
MOST_ASKED = DEVICE_PREFILL_CHUNK  # tokens of a pass that asks
# tokens, and more than a template puts before an answer, which the last pass has at least, unless it is the
# only one: recurrent layers can go back to where that begins
BEFORE_THE_END = 32
_LEAST = 24  # tokens of a window that tells anything
_TELLING = 1024  # tokens of a streamed pass that takes as long as the link
_KEPT = 5  # passes of either kind
# of a stream's time, which asking has to take at most. What either takes scatters, asking more; so of its
# last passes the best one counts: a choice for it goes on to be tried, one against it would stay
_BETTER = 0.95
# times a stream's time, up to which asking is tried that was tried once at most: one pass may take long by
# chance, and more tokens cost less than is expected of them once all experts are asked for
_WORTH_A_TRY = 1.5


class PromptWays:
    """Of one model and budget, and of one kind of pass: how the CPU helps, or that it does not."""

    def __init__(
        self, *, tries: bool, copy_s: float | None = None, most: int = MOST_ASKED, only_asks: bool = False
    ) -> None:
        """
        Args:
            tries: passes that ask while nobody knows what such long ones take. Else shorter prompts have to
                show first that it may pay.
            copy_s: of an expert over the link, as measured.
            most: tokens of a pass that asks.
            only_asks: nothing is streamed while an expert is missing.
        """
        self._only_asks = only_asks
        self._tries, self._copy_s = tries, copy_s
        self.most = most
        # seconds, less what the number of tokens makes of it, by the power of two of windows that they are
        self._asked: dict[int, deque[float]] = {}
        self._streams: deque[float] = deque(maxlen=_KEPT)  # seconds for each expert that was missing

    def rows(self, left: int, longest: int, missing: int) -> int:
        """Tokens of the next pass.

        Args:
            left: of the prompt, that are still to come.
            longest: pass that there is memory for.
            missing: experts of all layers that are in no slot.
        """
        if left <= self.most or not missing:
            return _leaving_an_end(left, longest)
        if self._only_asks:
            return _leaving_an_end(left, min(self.most, longest))
        whole, rest = divmod(left, self.most)
        each, last, streamed = (
            self._asked_s(self.most),
            self._asked_s(max(rest, 1)),
            self._streamed_s(missing),
        )
        if each is None or last is None or streamed is None:
            return _leaving_an_end(left, longest)
        if whole * each + last >= _BETTER * streamed * -(-left // longest):
            return _leaving_an_end(left, longest)
        return _leaving_an_end(left, self.most)

    def guess(self, tokens: int) -> float:
        """Seconds of a pass of so many tokens that asks; 0 while no pass of about that length did."""
        return (self._asked_s(tokens) or 0.0) if _octave(tokens) in self._asked else 0.0

    def asks(self, tokens: int, missing: int) -> bool:
        """Whether a pass of so many tokens, more than a window's, asks for its experts."""
        if tokens > self.most or not missing:
            return False
        if self._only_asks:
            return True
        asked, streamed = self._asked_s(tokens), self._streamed_s(missing)
        if asked is None or streamed is None:
            return self._tries
        known = len(self._asked.get(_octave(tokens), ()))
        is_tried = known == 1 or (self._tries and not known)
        return asked < (_WORTH_A_TRY if is_tried else _BETTER) * streamed

    def _asked_s(self, tokens: int) -> float | None:
        """As passes of about that length showed, or of the nearest one."""
        if not self._asked:
            return None
        octave = _octave(tokens)
        nearest = min(self._asked, key=lambda known: (abs(known - octave), known))
        return min(self._asked[nearest]) * _share(tokens)

    def _streamed_s(self, missing: int) -> float | None:
        one = statistics.median(self._streams) if self._streams else self._copy_s
        return None if one is None else one * missing

    def note_asked(self, tokens: int, seconds: float) -> None:
        """A pass of a prompt asked for its experts, or was a window, and took so long, of which capturing it
        is left out."""
        if tokens >= _LEAST:
            of_octave = self._asked.setdefault(_octave(tokens), deque(maxlen=_KEPT))
            of_octave.append(seconds / _share(tokens))

    def note_streamed(self, tokens: int, missing: int, seconds: float) -> None:
        """A pass streamed all that was missing before it."""
        if missing and tokens <= _TELLING:
            self._streams.append(seconds / missing)

    def forget(self) -> None:
        """The budget is another one."""
        self._asked.clear()
        self._streams.clear()


def _leaving_an_end(left: int, most: int) -> int:
    """The next pass's tokens, at most so many of those that are left."""
    return left if left <= most else min(most, left - BEFORE_THE_END)


def _octave(tokens: int) -> int:
    return max(0, math.ceil(math.log2(tokens / WINDOW)))


def _share(tokens: int) -> float:
    """What more tokens make of the time: they choose the same experts, the more often the more there are."""
    return float((tokens / WINDOW) ** 0.5)
