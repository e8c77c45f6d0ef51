"""The live panel as HTML, from snapshots alone. Every number comes from statistics that the
engine measured; nothing here is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app import words
from app.engine_status import EngineStatus
from app.jobs import JobView
from app.status_html import progress_bar
from localmoe.core.stats import GenerationStats
from localmoe.core.units import format_bytes

_OWNERS = ("shared", "draft", "kv", "slots", "workspace", "reserve")
_OWNER_NAMES = {
    "shared": "shared weights", "draft": "low-bit draft", "kv": "KV cache", "slots": "expert slots",
    "workspace": "workspace", "reserve": "kept free for activations",
}  # fmt: skip
_SPARK_WIDTH, _SPARK_HEIGHT = 240, 44


def panel_html(status: EngineStatus, job: JobView | None) -> str:
    """The whole panel; dashes until something was measured."""
    stats = job.stats if job is not None else None
    running = job is not None and job.finish is None
    state = "answering" if running else "last answer" if job is not None else "no answer yet"
    return (
        f'<div class="lm-panel"><div class="lm-panel-head"><h2>Live</h2>'
        f'<span class="lm-dot{" on" if running else ""}">{state}</span></div>'
        f"{_speed(stats, job.speeds if job is not None else ())}{_cache(stats)}"
        f"{_draft(status, stats, running)}{_memory(status)}{_copies(status, stats)}</div>"
    )


def _card(title: str, body: str, name: str) -> str:
    return f'<section class="lm-card" data-card="{name}"><h3>{escape(title)}</h3>{body}</section>'


def _fact(label: str, value: str, key: str = "", hint: str = "") -> str:
    title = f' title="{escape(hint)}"' if hint else ""
    measured = f'<b data-key="{key}">{escape(value)}</b>'
    return f'<div class="lm-fact"{title}><span>{escape(label)}</span>{measured}</div>'


def _speed(stats: GenerationStats | None, speeds: Sequence[float]) -> str:
    tokens = words.rate(stats.tokens_per_s if stats else None)
    big = f'<div class="lm-big"><b data-key="tokens_per_s">{tokens}</b><span>tokens/s</span></div>'
    facts = _fact(
        "First token", words.seconds(stats.ttft_s if stats else None), "ttft", "time to first token"
    )
    facts += _fact("Tokens", f"{stats.new_tokens:,}" if stats else words.NONE, "new_tokens")
    read = f"{stats.prompt_tokens:,} ({stats.reused_tokens:,} reused)" if stats else words.NONE
    facts += _fact(
        "Prompt", read, "prompt", "tokens of the prompt; reused: still in the KV cache from the last turn"
    )
    return _card("Speed", big + _sparkline(speeds) + facts, "speed")


def _sparkline(speeds: Sequence[float]) -> str:
    top = max(speeds, default=0.0)
    if len(speeds) < 2 or top <= 0:
        return f'<svg class="lm-spark" viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}" aria-hidden="true"></svg>'
    step = _SPARK_WIDTH / (len(speeds) - 1)
    points = [
        f"{index * step:.1f},{_SPARK_HEIGHT - 3 - (_SPARK_HEIGHT - 6) * speed / top:.1f}"
        for index, speed in enumerate(speeds)
    ]
    line = " ".join(points)
    return (
        f'<svg class="lm-spark" viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="tokens a second over the answer, at most {top:.1f}">'
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


def _cache(stats: GenerationStats | None) -> str:
    hit_rate = stats.hit_rate if stats else None
    counts = (stats.hits, stats.late, stats.misses) if stats else (0, 0, 0)
    whole = max(1, sum(counts))
    names = (("hit", "already in a slot"), ("late", "copy in flight"), ("miss", "fetched on demand"))
    bar = _bar(
        [(name, count / whole) for (name, _), count in zip(names, counts, strict=True)],
        f"hits {counts[0]}, late {counts[1]}, misses {counts[2]}",
    )
    legend = _legend([(name, text, f"{count:,}") for (name, text), count in zip(names, counts, strict=True)])
    return _card(
        "Expert cache", _fact("Hit rate", words.percent(hit_rate), "hit_rate") + bar + legend, "cache"
    )


def _draft(status: EngineStatus, stats: GenerationStats | None, answering: bool) -> str:
    length = stats.mean_draft_length if stats else None
    facts = _fact(
        "Accepted", words.percent(stats.acceptance_rate if stats else None), "acceptance",
        "share of the drafted tokens that the 16-bit model agreed with",
    )  # fmt: skip
    facts += _fact("Mean draft length", words.NONE if length is None else f"{length:.1f}", "draft_length")
    facts += _fact(
        "Expert match", words.percent(stats.expert_match_rate if stats else None), "expert_match",
        "share of (token, layer) where draft and target chose the same experts",
    )  # fmt: skip
    return _card("Drafting", facts + _improvement(status, answering), "draft")


def _improvement(status: EngineStatus, answering: bool) -> str:
    """A better draft while it is built; it is no live region, as it moves all the time (see `news_html`)."""
    if status.improvement is None:
        return ""
    text = escape(words.improvement(status, answering))
    bar = progress_bar(words.progress(status.improvement)[1], "building a better draft")
    return f'<div class="lm-improvement" data-key="improvement"><b>Better draft</b> {text}{bar}</div>'


def _memory(status: EngineStatus) -> str:
    if status.plan is None or status.info is None:
        return _card("Device memory", _bar([], "nothing loaded"), "memory")
    budget = max(1, status.plan.budget_bytes)
    held = {owner: held_bytes for owner, held_bytes in status.memory.items() if held_bytes}
    text = f"{format_bytes(sum(held.values()))} of {format_bytes(budget)}"
    if "workspace" not in held:  # not held between two steps, but never given to slots either
        held["reserve"] = status.plan.workspace_bytes
    owners = sorted(held, key=lambda owner: _OWNERS.index(owner) if owner in _OWNERS else len(_OWNERS))
    bar = _bar([(f"own-{owner}", held[owner] / budget) for owner in owners], text)
    legend = _legend(
        [(f"own-{owner}", _OWNER_NAMES.get(owner, owner), format_bytes(held[owner])) for owner in owners]
    )
    return _card(
        words.memory_name(status.info.device), _fact("Used", text, "memory") + bar + legend, "memory"
    )


def _copies(status: EngineStatus, stats: GenerationStats | None) -> str:
    per_token = stats.h2d_bytes_per_token if stats else None
    facts = _fact("This answer", format_bytes(stats.h2d_bytes) if stats else words.NONE, "h2d")
    facts += _fact("Per token", words.NONE if per_token is None else format_bytes(per_token), "h2d_token")
    facts += _fact("Waited for copies", words.seconds(stats.stall_s if stats else None), "stall")
    if status.info is not None:
        facts += _fact("Through", words.link(status.info.link), "link")
    return _card("Copied to the device", facts, "copies")
