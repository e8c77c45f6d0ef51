"""One line on an answer that has been written: how fast, and how. Computes nothing."""

from __future__ import annotations

from localmoe.cli.output import number, percent
from localmoe.core.stats import GenerationStats


def answer_line(stats: GenerationStats, link: str) -> str:
    """link: of EngineInfo."""
    parts = [
        f"{stats.new_tokens} tokens", f"{number(stats.tokens_per_s)} tok/s", f"TTFT {stats.ttft_s:.2f} s",
        f"hit rate {percent(stats.hit_rate)}", f"accepted {percent(stats.acceptance_rate)}", f"link: {link}",
    ]  # fmt: skip
    if stats.draft_aside:
        parts.append("draft laid aside")
    if stats.approximate:
        parts.append("APPROXIMATE: by the draft alone")
    return "[" + ", ".join(parts) + "]"
