"""Measures one setting (policy and draft length) of a loaded engine on prompts, greedy. Prints nothing and
chooses no setting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from localmoe.core.config import DraftLength, GenerationRequest
from localmoe.core.errors import LocalMoeError
from localmoe.core.stream import StreamEvent
from localmoe.engine.bench_row import Row


class BenchmarkCancelledError(LocalMoeError):
    """The user stopped a benchmark; what it had not measured is not known."""


class Captures(Protocol):
    """Knows how long answers have waited while passes were captured."""

    def capture_s(self) -> float:
        """Seconds so far."""


class Subject(Protocol):
    """What is measured: `engine.Engine`, or something that stands in for it."""

    @property
    def live(self) -> Captures:
        """What may be seen of it."""

    def reset(self, *, ram: bool = False) -> None:
        """Empty slots and, if `ram`, RAM, where that holds a part; no conversation, nothing learnt."""

    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        """One answer."""


def measure_setting(
    engine: Subject,
    requests: Sequence[GenerationRequest],
    policy: str,
    draft_length: DraftLength,
    *,
    again: bool = False,
    stop: threading.Event | None = None,
    on_event: Callable[[int, int], None] | None = None,
) -> Row:
    """Answer all requests from empty slots, and empty RAM where experts lie on the disk. On a GPU each kind
    of pass is captured once, when it is first wanted or soon after; so that this is not counted against
    whoever comes first, the row's rates leave that time out.

    Args:
        again: answer them twice, of which the second time counts: slots and RAM hold what they asked for.
        stop: ends the measurement between two steps.
        on_event: told of requests answered and of tokens of the one being answered.

    Raises:
        BenchmarkCancelledError: `stop` was set.
        LocalMoeError: as `Engine.stream`.
    """
    row = Row(policy, draft_length)
    engine.reset(ram=True)  # every setting starts alike
    if again:
        for request in requests:
            for _ in engine.stream(replace(request, draft_length=draft_length, policy=policy), stop):
                check_stop(stop)
    for request in requests:
        tokens: list[int] = []
        captured_s = 0.0  # until the first token
        for event in engine.stream(replace(request, draft_length=draft_length, policy=policy), stop):
            if not tokens:
                captured_s = engine.live.capture_s()
            tokens += event.token_ids
            check_stop(stop)
            stats = event.stats
            if on_event is not None:
                on_event(len(row.stats), len(tokens))
        row.captured_s += engine.live.capture_s() - captured_s
        row.stats.append(stats)
        row.tokens.append(tuple(tokens))
    return row


def check_stop(stop: threading.Event | None) -> None:
    """Raises BenchmarkCancelledError if `stop` was set."""
    if stop is not None and stop.is_set():
        raise BenchmarkCancelledError("The benchmark was stopped.")


def same_tokens(rows: Sequence[Row]) -> bool:
    """Whether all settings gave the same answers, token for token."""
    return all(row.tokens == rows[0].tokens for row in rows)
