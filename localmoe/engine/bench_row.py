"""One setting's answers to all prompts, and the ratios of their sums. Measures and prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from localmoe.core.config import DraftLength
from localmoe.core.stats import GenerationStats

Summary = dict[str, float | int | str | None]


@dataclass(slots=True)
class Row:
    """One setting's answers to all prompts. captured_s: seconds between their first and last tokens in which
    passes were captured."""

    policy: str
    draft_length: DraftLength
    stats: list[GenerationStats] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    captured_s: float = 0.0

    def summary(self) -> Summary:
        """Ratios of sums over all prompts, so that long answers weigh more than short ones; the time of
        captures is left out."""
        decode_tokens = sum(max(0, s.new_tokens - 1) for s in self.stats)
        decode_s = sum((s.tpot_s or 0.0) * max(0, s.new_tokens - 1) for s in self.stats) - self.captured_s
        decode_bytes = sum(s.h2d_bytes - s.prefill_h2d_bytes for s in self.stats)
        demands = sum(s.expert_demands for s in self.stats)
        steps, drafted = sum(s.steps for s in self.stats), sum(s.drafted for s in self.stats)
        left_out = sum(s.left_out for s in self.stats)
        return {
            "policy": self.policy,
            "draft_length": self.draft_length,
            "prompts": len(self.stats),
            "new_tokens": sum(s.new_tokens for s in self.stats),
            "steps": steps,
            "tokens_per_s": share(decode_tokens, decode_s),
            "tpot_s": share(decode_s, decode_tokens),
            "draft_s_per_step": share(sum(s.draft_s for s in self.stats), steps),
            "verify_s_per_step": share(sum(s.verify_s for s in self.stats), steps),
            "acceptance_rate": share(sum(s.accepted for s in self.stats), drafted),
            "mean_draft_length": share(drafted, steps),
            "left_out_rate": share(left_out, drafted + left_out),
            "expert_match_rate": _mean(self.stats, "expert_match_rate"),
            "expert_order_match_rate": _mean(self.stats, "expert_order_match_rate"),
            "hit_rate": share(sum(s.hits for s in self.stats), demands),
            "token_hit_rate": _mean(self.stats, "token_hit_rate"),
            "late_rate": share(sum(s.late for s in self.stats), demands),
            "coverage_rate": share(
                sum((s.coverage_rate or 0.0) * s.expert_demands for s in self.stats), demands
            ),
            "h2d_bytes_per_token": share(decode_bytes, decode_tokens),
            "h2d_bytes_per_s": share(decode_bytes, decode_s),
            "captured_s": self.captured_s,
            "draft_aside": share(sum(s.draft_aside for s in self.stats), len(self.stats)),
            "stall_s": _total([s.stall_s for s in self.stats]),
        }


def share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None


def _mean(stats: Sequence[GenerationStats], name: str) -> float | None:
    values = [value for value in (getattr(entry, name) for entry in stats) if value is not None]
    return sum(values) / len(values) if values else None


def _total(values: Sequence[float | None]) -> float | None:
    """None if any is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
