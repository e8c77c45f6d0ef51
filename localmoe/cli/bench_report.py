"""What `localmoe bench` prints of one setting: ratios of sums over all its answers. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from localmoe.cli.output import number, percent
from localmoe.core.config import DraftLength
from localmoe.core.stats import GenerationStats

COLUMNS = (
    "policy, draft length", "tok/s", "TPOT ms", "draft ms", "verify ms", "accepted", "expert match",
    "hit rate", "token hits", "late", "MB / token", "link GB/s", "stall s",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """One setting's answers to all prompts."""

    policy: str
    draft_length: DraftLength
    stats: list[GenerationStats] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def summary(self) -> dict[str, float | int | str | None]:
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


def cells(summary: dict[str, float | int | str | None]) -> list[str]:
    """A table row of a summary, in the order of COLUMNS."""

    def scaled(name: str, factor: float, digits: int) -> str:
        entry = summary[name]
        return number(entry * factor if isinstance(entry, (int, float)) else None, digits)

    def share(name: str) -> str:
        entry = summary[name]
        return percent(entry if isinstance(entry, (int, float)) else None)

    return [
        f"{summary['policy']}, {summary['draft_length']}", scaled("tokens_per_s", 1, 1),
        scaled("tpot_s", 1e3, 2), scaled("draft_s_per_step", 1e3, 2), scaled("verify_s_per_step", 1e3, 2),
        share("acceptance_rate"), share("expert_match_rate"), share("hit_rate"), share("token_hit_rate"),
        share("late_rate"), scaled("h2d_bytes_per_token", 1e-6, 2), scaled("h2d_bytes_per_s", 1e-9, 2),
        scaled("stall_s", 1, 2),
    ]  # fmt: skip


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(stats: Sequence[GenerationStats], name: str) -> float | None:
    values = [value for value in (getattr(entry, name) for entry in stats) if value is not None]
    return sum(values) / len(values) if values else None


def _total(values: Sequence[float | None]) -> float | None:
    """None if any is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
