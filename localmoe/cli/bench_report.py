"""A line of what `localmoe bench` prints. Measures nothing (engine.benchmark does)."""

from __future__ import annotations

from localmoe.cli.output import number, percent
from localmoe.engine.bench_row import Summary

COLUMNS = (
    "policy, draft length", "tok/s", "TPOT ms", "draft ms", "verify ms", "drafted", "accepted",
    "expert match", "hit rate", "token hits", "late", "MB / token", "link GB/s", "stall s",
)  # fmt: skip


def cells(summary: Summary) -> list[str]:
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
        scaled("mean_draft_length", 1, 1), share("acceptance_rate"), share("expert_match_rate"),
        share("hit_rate"), share("token_hit_rate"),
        share("late_rate"), scaled("h2d_bytes_per_token", 1e-6, 2), scaled("h2d_bytes_per_s", 1e-9, 2),
        scaled("stall_s", 1, 2),
    ]  # fmt: skip
