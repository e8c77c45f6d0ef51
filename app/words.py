"""Numbers and engine states in words, for the panel, the answer lines and the settings. Makes no HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from app.engine_status import EngineStatus
from app.texts import ENGLISH, Texts
from localmoe.core.config import SamplingConfig, Thinking
from localmoe.core.live_state import PromptState
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint, Progress
from localmoe.core.units import format_bytes, format_seconds

_THREADS = re.compile(r"(?P<way>.+) \((?P<count>\d+) threads(?P<unit>, a matrix unit for prompts)?\)")
_PATIENCE_S = 1.0  # that nobody asks why
NONE = "—"  # nothing ran that could be measured
THINKING: dict[Thinking, str] = {
    "auto": "As the model does it", "off": "Off", "on": "On", "low": "Low effort",
    "medium": "Medium effort", "high": "High effort",
}  # fmt: skip


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


def link(text: str, t: Texts = ENGLISH) -> str:
    """The way experts are copied; an emulated one is always called an emulated link."""
    if text.startswith("emulated"):
        return f"{t('emulated link')},{text.removeprefix('emulated')}"
    return t(text)


def prompt_line(prompt: PromptState | None, waited_s: float, t: Texts = ENGLISH) -> str:
    """What an answer without a token waits for, e.g. "256 of 1,000 tokens read · 12.3 GB of experts from the
    disk · 5 s"; "" while it does not wait for long."""
    if prompt is None or waited_s < _PATIENCE_S:
        return ""
    parts = [t("{read} of {tokens} tokens read", read=f"{prompt.read:,}", tokens=f"{prompt.tokens:,}")]
    if prompt.images:
        parts.insert(0, t("{count} pictures to be read", count=prompt.images))
    if prompt.disk_bytes:
        parts.append(t("{size} of experts from the disk", size=format_bytes(prompt.disk_bytes)))
    every = 1 if waited_s < 10 else 5  # seconds: who has it read aloud is told of each change
    return " · ".join([*parts, f"{int(waited_s // every * every)} s"])


def answer_line(stats: Mapping[str, Any], finish: str | None, t: Texts = ENGLISH) -> str:
    """The line under an answer, e.g. "12.3 tok/s · 128 tokens · first token 0.21 s · hits 87 %"."""
    if not stats:
        return t("stopped before the first token") if finish == "cancelled" else ""
    parts = [
        f"{rate(stats.get('tokens_per_s'))} tok/s",
        t("{count} tokens", count=f"{_tokens(stats):,}"),
        t("first token {time}", time=seconds(stats.get("ttft_s"))),
        t("hits {share}", share=percent(stats.get("hit_rate"))),
    ]
    if stats.get("drafted"):
        parts.append(t("accepted {share}", share=percent(stats.get("acceptance_rate"))))
    if stats.get("draft_aside"):
        parts.append(t("draft laid aside"))
    if stats.get("approximate"):
        parts.insert(0, t("approximate: written by the draft alone"))
    if str(stats.get("link", "")).startswith("emulated"):
        parts.append(link(str(stats["link"]), t))
    endings = {
        "cancelled": t("stopped"), "length": t("cut at the token limit"), None: t("interrupted"),
    }  # fmt: skip
    if finish in endings:
        parts.append(endings[finish])
    return " · ".join(parts)


def _tokens(stats: Mapping[str, Any]) -> int:
    """Tokens of an answer, with those that it had before it was continued."""
    return int((stats.get("new_tokens") or 0) + (stats.get("earlier_tokens") or 0))


def expert_share(plan: MemoryPlan, footprint: ModelFootprint, device: str, t: Texts = ENGLISH) -> str:
    """ "38 % of the experts stay in VRAM (450 of 1,184)"."""
    if plan.in_place:
        return ram_share(plan, footprint, t) or t("all experts are computed where they lie in RAM")
    place = t("emulated device memory") if device.startswith("cpu") else t("VRAM")
    total = footprint.total_experts
    here = min(plan.num_slots, total)
    text = t(
        "{share} of the experts stay in {place} ({here} of {total})",
        share=percent(here / total if total else None), place=place, here=f"{here:,}", total=f"{total:,}",
    )  # fmt: skip
    in_ram = ram_share(plan, footprint, t)
    return f"{text}; {in_ram}" if in_ram else text


def ram_share(plan: MemoryPlan, footprint: ModelFootprint, t: Texts = ENGLISH) -> str:
    """The same of RAM, where experts lie on the disk; "" where they do not."""
    total = footprint.total_experts
    if not plan.disk_bytes:
        return ""
    if plan.ram_experts >= total:
        return t("RAM has room for all experts, which are read from the disk when they are first asked for")
    return t(
        "RAM has room for {share} of the experts ({here} of {total}), the others are read from the disk",
        share=percent(plan.ram_experts / total), here=f"{plan.ram_experts:,}", total=f"{total:,}",
    )  # fmt: skip


def lanes(text: str, t: Texts = ENGLISH) -> str:
    """Where experts that are not in VRAM come from, with the number of threads that compute them."""
    found = _THREADS.fullmatch(text)
    if found is None:
        return t(text)
    unit = f", {t('a matrix unit for prompts')}" if found["unit"] else ""
    return f"{t(found['way'])} ({t('{count} threads', count=found['count'])}{unit})"


def memory_name(device: str, t: Texts = ENGLISH) -> str:
    """What the budget is a budget of."""
    return t("Emulated device memory") if device.startswith("cpu") else t("Device memory")


def progress(report: Progress | None, t: Texts = ENGLISH) -> tuple[str, float]:
    """A loading report in words, and its share done."""
    if report is None:
        return t("starting"), 0.0
    share = min(1.0, report.done / report.total) if report.total > 0 else 0.0
    if report.unit == "bytes":
        amount = t("{done} of {total}", done=format_bytes(report.done), total=format_bytes(report.total))
    else:
        amount = t("{done} of {total}", done=f"{report.done:,}", total=f"{report.total:,}")
        amount += f" {t(report.unit)}"
    left = ""
    if report.seconds_left is not None:
        left = ", " + t("about {time} left", time=format_seconds(report.seconds_left))
    detail = f"; {report.detail}" if report.detail else ""
    return f"{t(report.stage)}: {amount} ({100 * share:.0f} %{left}){detail}", share


def improvement(status: EngineStatus, answering: bool, t: Texts = ENGLISH) -> str:
    """How far the better draft is, or why it was not built; "" when there is nothing to say."""
    if status.improvement is None:
        return status.improvement_note
    pause = t("It pauses while an answer is written.")
    if answering:
        pause = t("Paused while the answer is written.")
    return f"{progress(status.improvement, t)[0]}. {pause}"


def improvement_news(status: EngineStatus, t: Texts = ENGLISH) -> str:
    """The same for a screen reader, which is told at the start, at every quarter, and of a failure."""
    report = status.improvement
    if report is None:
        note = status.improvement_note
        return f"{t('The better draft was not built.')} {note}" if note else ""
    quarters = int(4 * progress(report)[1]) if report.unit == "experts" else 0
    return t("A better draft is being built in the background: {share} % done.", share=25 * quarters)


def drafting(status: EngineStatus, t: Texts = ENGLISH) -> str:
    """Whether the model drafts, and if not, why; and whether it does so otherwise than was asked for."""
    if status.plan is None:
        return ""
    other = f"; {t('this model has no MTP layer that can draft')}" if status.lacks_mtp else ""
    return _drafting(status, t) + other


def _drafting(status: EngineStatus, t: Texts) -> str:
    assert status.plan is not None
    if status.plan.draft_aside:
        return t("draft laid aside")
    if status.plan.drafting:
        return t("drafting on")
    if status.info is not None and status.info.looks_up:
        return t("drafting by prompt lookup")
    reason = status.plan.drafting_reason
    return f"{t('drafting off')}: {t(reason)}" if reason else t("drafting off")


def draft(status: EngineStatus, t: Texts = ENGLISH) -> str:
    """What drafts in the loaded model, and why it is another draft than was asked for."""
    assert status.info is not None
    why = f" ({t('this model has no MTP layer that can draft')})" if status.lacks_mtp else ""
    return status.info.draft + why


def sampling(config: SamplingConfig, t: Texts = ENGLISH) -> str:
    """How tokens are chosen, e.g. "temperature 1, top-k 64, top-p 0.95"."""
    usual = SamplingConfig()
    parts = [
        t("always the likeliest token") if config.greedy else f"{t('temperature')} {config.temperature:g}"
    ]
    if not config.greedy:
        names = {"top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
        given = ((name, getattr(config, key), getattr(usual, key)) for key, name in names.items())
        parts += [f"{name} {value:g}" for name, value, off in given if value != off]
    if config.repetition_penalty != usual.repetition_penalty:
        parts.append(f"{t('repetition penalty')} {config.repetition_penalty:g}")
    return ", ".join(parts)
