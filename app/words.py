"""Numbers and engine states in words, for the panel, the answer lines and the settings. Makes no HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.engine_status import EngineStatus
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint, Progress
from localmoe.core.units import format_bytes, format_seconds

NONE = "—"  # nothing ran that could be measured


def percent(ratio: float | None) -> str:
    """ "87 %", or a dash."""
    return NONE if ratio is None else f"{100 * ratio:.0f} %"


def rate(tokens_per_s: float | None) -> str:
    """Tokens a second with three digits at most."""
    if tokens_per_s is None:
        return NONE
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"


def seconds(value: float | None) -> str:
    """ "0.21 s" or "87 ms"."""
    if value is None:
        return NONE
    return f"{1000 * value:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def link(text: str) -> str:
    """The way experts are copied; an emulated one is always called an emulated link."""
    return f"emulated link,{text.removeprefix('emulated')}" if text.startswith("emulated") else text


def answer_line(stats: Mapping[str, Any], finish: str | None) -> str:
    """The line under an answer, e.g. "12.3 tok/s · 128 tokens · first token 0.21 s · hits 87 %"."""
    if not stats:
        return "stopped before the first token" if finish == "cancelled" else ""
    parts = [
        f"{rate(stats.get('tokens_per_s'))} tok/s",
        f"{stats.get('new_tokens', 0):,} tokens",
        f"first token {seconds(stats.get('ttft_s'))}",
        f"hits {percent(stats.get('hit_rate'))}",
    ]
    if stats.get("drafted"):
        parts.append(f"accepted {percent(stats.get('acceptance_rate'))}")
    if str(stats.get("link", "")).startswith("emulated"):
        parts.append(link(str(stats["link"])))
    endings = {"cancelled": "stopped", "length": "cut at the token limit", None: "interrupted"}
    if finish in endings:
        parts.append(endings[finish])
    return " · ".join(parts)


def expert_share(plan: MemoryPlan, footprint: ModelFootprint, device: str) -> str:
    """ "38 % of the experts stay in VRAM (450 of 1,184)"."""
    place = "emulated device memory" if device.startswith("cpu") else "VRAM"
    total = footprint.total_experts
    share = percent(min(plan.num_slots, total) / total if total else None)
    return f"{share} of the experts stay in {place} ({min(plan.num_slots, total):,} of {total:,})"


def memory_name(device: str) -> str:
    """What the budget is a budget of."""
    return "Emulated device memory" if device.startswith("cpu") else "Device memory"


def progress(report: Progress | None) -> tuple[str, float]:
    """A loading report in words, and its share done."""
    if report is None:
        return "starting", 0.0
    share = min(1.0, report.done / report.total) if report.total > 0 else 0.0
    if report.unit == "bytes":
        amount = f"{format_bytes(report.done)} of {format_bytes(report.total)}"
    else:
        amount = f"{report.done:,} of {report.total:,} {report.unit}"
    left = "" if report.seconds_left is None else f", about {format_seconds(report.seconds_left)} left"
    detail = f"; {report.detail}" if report.detail else ""
    return f"{report.stage}: {amount} ({100 * share:.0f} %{left}){detail}", share


def improvement(status: EngineStatus, answering: bool) -> str:
    """How far the better draft is, or why it was not built; "" when there is nothing to say."""
    if status.improvement is None:
        return status.improvement_note
    pause = "Paused while the answer is written." if answering else "It pauses while an answer is written."
    return f"{progress(status.improvement)[0]}. {pause}"


def improvement_news(status: EngineStatus) -> str:
    """The same for a screen reader, which is told at the start, at every quarter, and of a failure."""
    report = status.improvement
    if report is None:
        note = status.improvement_note
        return f"The better draft was not built. {note}" if note else ""
    quarters = int(4 * progress(report)[1]) if report.unit == "experts" else 0
    return f"A better draft is being built in the background: {25 * quarters} % done."


def drafting(status: EngineStatus) -> str:
    """Whether the model drafts, and if not, why."""
    if status.plan is None:
        return ""
    if status.plan.drafting:
        return "drafting on"
    return f"drafting off: {status.plan.drafting_reason}" if status.plan.drafting_reason else "drafting off"
