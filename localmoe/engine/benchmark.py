"""Measures one setting (policy and draft length) of a loaded engine on prompts, greedy. Prints nothing and
chooses no setting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from localmoe.core.config import DraftLength, GenerationRequest
from localmoe.core.errors import LocalMoeError
from localmoe.core.stats import GenerationStats
from localmoe.core.stream import StreamEvent

Summary = dict[str, float | int | str | None]


class BenchmarkCancelledError(LocalMoeError):
    """The user stopped a benchmark; what it had not measured is not known."""


class Subject(Protocol):
    """What is measured: `engine.Engine`, or something that stands in for it."""

    def reset(self) -> None:
        """Empty slots, no conversation, nothing learnt."""

    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        """One answer."""


@dataclass(slots=True)
class Row:
    """One setting's answers to all prompts."""

    policy: str
    draft_length: DraftLength
    stats: list[GenerationStats] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def summary(self) -> Summary:
        """Ratios of sums over all prompts, so that long answers weigh more than short ones."""
        decode_tokens = sum(max(0, s.new_tokens - 1) for s in self.stats)
        decode_s = sum((s.tpot_s or 0.0) * max(0, s.new_tokens - 1) for s in self.stats)
        decode_bytes = sum(s.h2d_bytes - s.prefill_h2d_bytes for s in self.stats)
        demands = sum(s.expert_demands for s in self.stats)
        steps = sum(s.steps for s in self.stats)
        return {
            "policy": self.policy,
            "draft_length": self.draft_length,
            "prompts": len(self.stats),
            "new_tokens": sum(s.new_tokens for s in self.stats),
            "steps": steps,
            "tokens_per_s": _share(decode_tokens, decode_s),
            "tpot_s": _share(decode_s, decode_tokens),
            "draft_s_per_step": _share(sum(s.draft_s for s in self.stats), steps),
            "verify_s_per_step": _share(sum(s.verify_s for s in self.stats), steps),
            "acceptance_rate": _share(
                sum(s.accepted for s in self.stats), sum(s.drafted for s in self.stats)
            ),
            "expert_match_rate": _mean(self.stats, "expert_match_rate"),
            "hit_rate": _share(sum(s.hits for s in self.stats), demands),
            "token_hit_rate": _mean(self.stats, "token_hit_rate"),
            "late_rate": _share(sum(s.late for s in self.stats), demands),
            "h2d_bytes_per_token": _share(decode_bytes, decode_tokens),
            "h2d_bytes_per_s": _share(decode_bytes, decode_s),
            "stall_s": _total([s.stall_s for s in self.stats]),
        }


def measure_setting(
    engine: Subject,
    requests: Sequence[GenerationRequest],
    policy: str,
    draft_length: DraftLength,
    *,
    stop: threading.Event | None = None,
    on_event: Callable[[int, int], None] | None = None,
) -> Row:
    """Answer all requests from empty slots.

    Args:
        stop: ends the measurement between two steps.
        on_event: told of requests answered and of tokens of the one being answered.

    Raises:
        BenchmarkCancelledError: `stop` was set.
        LocalMoeError: as `Engine.stream`.
    """
    row = Row(policy, draft_length)
    engine.reset()  # every setting starts with empty slots
    for request in requests:
        tokens: list[int] = []
        for event in engine.stream(replace(request, draft_length=draft_length, policy=policy), stop):
            tokens += event.token_ids
            check_stop(stop)
            stats = event.stats
            if on_event is not None:
                on_event(len(row.stats), len(tokens))
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


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(stats: Sequence[GenerationStats], name: str) -> float | None:
    values = [value for value in (getattr(entry, name) for entry in stats) if value is not None]
    return sum(values) / len(values) if values else None


def _total(values: Sequence[float | None]) -> float | None:
    """None if any is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
