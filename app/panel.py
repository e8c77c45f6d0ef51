"""The live panel as HTML, from snapshots alone. Every number comes from statistics that the
engine measured; nothing here is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app import words
from app.engine_status import EngineStatus
from app.jobs import JobView
from app.status_html import progress_bar
from app.texts import ENGLISH, Texts
from localmoe.core.stats import GenerationStats
from localmoe.core.units import format_bytes

_OWNERS = ("shared", "draft", "kv", "slots", "workspace", "reserve")
_OWNER_NAMES = {
    "shared": "shared weights", "draft": "low-bit draft", "kv": "KV cache", "slots": "expert slots",
    "workspace": "workspace", "reserve": "kept free for activations",
}  # fmt: skip
_SPARK_WIDTH, _SPARK_HEIGHT = 240, 44


def panel_html(status: EngineStatus, job: JobView | None, t: Texts = ENGLISH) -> str:
    """The whole panel; dashes until something was measured."""
    stats = job.stats if job is not None else None
    running = job is not None and job.finish is None
    state = t("answering") if running else t("last answer") if job is not None else t("no answer yet")
    if stats is not None and stats.approximate:
        state += f" · {t('approximate')}"
    return (
        f'<div class="lm-panel"><div class="lm-panel-head"><h2>{escape(t("Live"))}</h2>'
        f'<span class="lm-dot{" on" if running else ""}">{state}</span></div>'
        f"{_speed(stats, job.speeds if job is not None else (), t)}{_cache(stats, t)}"
        f"{_draft(status, stats, running, t)}{_memory(status, t)}{_copies(status, stats, t)}</div>"
    )


def _card(title: str, body: str, name: str) -> str:
    return f'<section class="lm-card" data-card="{name}"><h3>{escape(title)}</h3>{body}</section>'


def _fact(label: str, value: str, key: str = "", hint: str = "") -> str:
    title = f' title="{escape(hint)}"' if hint else ""
    measured = f'<b data-key="{key}">{escape(value)}</b>'
    return f'<div class="lm-fact"{title}><span>{escape(label)}</span>{measured}</div>'


def _speed(stats: GenerationStats | None, speeds: Sequence[float], t: Texts) -> str:
    tokens = words.rate(stats.tokens_per_s if stats else None)
    unit = escape(t("tokens/s"))
    big = f'<div class="lm-big"><b data-key="tokens_per_s">{tokens}</b><span>{unit}</span></div>'
    facts = _fact(
        t("First token"), words.seconds(stats.ttft_s if stats else None), "ttft", t("time to first token")
    )
    facts += _fact(t("Tokens"), f"{stats.new_tokens:,}" if stats else words.NONE, "new_tokens")
    read = words.NONE
    if stats:
        read = t(
            "{count} ({reused} reused)", count=f"{stats.prompt_tokens:,}", reused=f"{stats.reused_tokens:,}"
        )
    facts += _fact(
        t("Prompt"),
        read,
        "prompt",
        t("tokens of the prompt; reused: still in the KV cache from the last turn"),
    )
    return _card(t("Speed"), big + _sparkline(speeds, t) + facts, "speed")


def _sparkline(speeds: Sequence[float], t: Texts) -> str:
    top = max(speeds, default=0.0)
    if len(speeds) < 2 or top <= 0:
        return f'<svg class="lm-spark" viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}" aria-hidden="true"></svg>'
    step = _SPARK_WIDTH / (len(speeds) - 1)
    points = [
        f"{index * step:.1f},{_SPARK_HEIGHT - 3 - (_SPARK_HEIGHT - 6) * speed / top:.1f}"
        for index, speed in enumerate(speeds)
    ]
    line = " ".join(points)
    label = escape(t("tokens a second over the answer, at most {top}", top=f"{top:.1f}"))
    return (
        f'<svg class="lm-spark" viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{label}">'
        f'<polygon points="0,{_SPARK_HEIGHT} {line} {_SPARK_WIDTH},{_SPARK_HEIGHT}"/>'
        f'<polyline points="{line}"/></svg>'
    )


def _bar(parts: Sequence[tuple[str, float]], label: str) -> str:
    """A bar of shares (class, share of the whole)."""
    spans = "".join(
        f'<i class="{name}" style="width:{100 * share:.2f}%"></i>' for name, share in parts if share > 0
    )
    return f'<div class="lm-bar" role="img" aria-label="{escape(label)}">{spans}</div>'


def _legend(parts: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(
        f'<li><i class="{name}"></i><span>{escape(text)}</span><b>{escape(value)}</b></li>'
        for name, text, value in parts
    )
    return f'<ul class="lm-legend">{items}</ul>'


def _cache(stats: GenerationStats | None, t: Texts) -> str:
    hit_rate = stats.hit_rate if stats else None
    counts = [stats.hits, stats.late, stats.misses] if stats else [0, 0, 0]
    names = [
        ("hit", t("already in a slot")), ("late", t("copy in flight")), ("miss", t("fetched on demand")),
    ]  # fmt: skip
    label = t("hits {hits}, late {late}, misses {misses}", hits=counts[0], late=counts[1], misses=counts[2])
    if stats and stats.cpu_jobs:
        names.append(("cpu", t("computed on the CPU")))
        counts.append(stats.computed)
        label += t(", computed on the CPU {count}", count=stats.computed)
    whole = max(1, sum(counts))
    bar = _bar([(name, count / whole) for (name, _), count in zip(names, counts, strict=True)], label)
    legend = _legend([(name, text, f"{count:,}") for (name, text), count in zip(names, counts, strict=True)])
    return _card(
        t("Expert cache"), _fact(t("Hit rate"), words.percent(hit_rate), "hit_rate") + bar + legend, "cache"
    )


def _draft(status: EngineStatus, stats: GenerationStats | None, answering: bool, t: Texts) -> str:
    length = stats.mean_draft_length if stats else None
    facts = _fact(
        t("Accepted"), words.percent(stats.acceptance_rate if stats else None), "acceptance",
        t("share of the drafted tokens that the 16-bit model agreed with"),
    )  # fmt: skip
    facts += _fact(t("Mean draft length"), words.NONE if length is None else f"{length:.1f}", "draft_length")
    facts += _fact(
        t("Expert match"), words.percent(stats.expert_match_rate if stats else None), "expert_match",
        t("share of (token, layer) where draft and target chose the same experts"),
    )  # fmt: skip
    return _card(t("Drafting"), facts + _improvement(status, answering, t), "draft")


def _improvement(status: EngineStatus, answering: bool, t: Texts) -> str:
    """A better draft while it is built; it is no live region, as it moves all the time (see `news_html`)."""
    if status.improvement is None:
        return ""
    text = escape(words.improvement(status, answering, t))
    bar = progress_bar(words.progress(status.improvement)[1], t("building a better draft"))
    name = escape(t("Better draft"))
    return f'<div class="lm-improvement" data-key="improvement"><b>{name}</b> {text}{bar}</div>'


def _memory(status: EngineStatus, t: Texts) -> str:
    if status.plan is None or status.info is None:
        return _card(t("Device memory"), _bar([], t("nothing loaded")), "memory")
    budget = max(1, status.plan.budget_bytes)
    held = {owner: held_bytes for owner, held_bytes in status.memory.items() if held_bytes}
    text = t("{done} of {total}", done=format_bytes(sum(held.values())), total=format_bytes(budget))
    if "workspace" not in held:  # not held between two steps, but never given to slots either
        held["reserve"] = status.plan.workspace_bytes
    owners = sorted(held, key=lambda owner: _OWNERS.index(owner) if owner in _OWNERS else len(_OWNERS))
    bar = _bar([(f"own-{owner}", held[owner] / budget) for owner in owners], text)
    legend = _legend(
        [(f"own-{owner}", t(_OWNER_NAMES.get(owner, owner)), format_bytes(held[owner])) for owner in owners]
    )
    return _card(
        words.memory_name(status.info.device, t), _fact(t("Used"), text, "memory") + bar + legend, "memory"
    )


def _copies(status: EngineStatus, stats: GenerationStats | None, t: Texts) -> str:
    per_token = stats.h2d_bytes_per_token if stats else None
    facts = _fact(t("This answer"), format_bytes(stats.h2d_bytes) if stats else words.NONE, "h2d")
    facts += _fact(t("Per token"), words.NONE if per_token is None else format_bytes(per_token), "h2d_token")
    facts += _fact(t("Waited for copies"), words.seconds(stats.stall_s if stats else None), "stall")
    if stats and stats.cpu_jobs:
        hint = t("weights that the CPU read to compute experts, beside the copies")
        facts += _fact(t("Read by the CPU"), format_bytes(stats.cpu_bytes), "cpu_bytes", hint)
    if status.info is not None:
        facts += _fact(t("Through"), words.link(status.info.link, t), "link")
    return _card(t("Copied to the device"), facts, "copies")
