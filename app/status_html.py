"""Sentences about the engine as HTML: the header, the facts under the settings, notices. All is escaped."""

from __future__ import annotations

from html import escape

from app import words
from app.engine_status import EngineStatus
from localmoe.core.units import format_bytes

DEMO_NOTICE = "a tiny demo model; choose a real one under Settings"


def header_html(status: EngineStatus) -> str:
    """Model, state, and what the user can do about an error."""
    name = escape(status.info.name if status.info is not None else status.model)
    if status.phase == "error":
        way_on = "Change the model or the budget under Settings and press Apply."
        alert = message_html(f"{status.error} {way_on}", False)
        return f'<div class="lm-head"><strong>{name}</strong>{_chip("bad", "not loaded")}</div>{alert}'
    if status.phase == "loading":
        text, share = words.progress(status.progress)
        chip = _chip("busy", "loading")
        return (
            f'<div class="lm-head"><strong>{name}</strong>{chip}'
            f'<span class="lm-muted" role="status">{escape(text)}</span></div>'
            f"{progress_bar(share, 'loading')}"
        )
    assert status.info is not None and status.plan is not None
    budget = f"{format_bytes(status.plan.budget_bytes)} budget"
    facts = escape(" · ".join((status.info.device, budget, words.drafting(status))))
    toy = f'<span class="lm-muted">{DEMO_NOTICE}</span>' if status.model == "demo" else ""
    return (
        f'<div class="lm-head"><strong>{name}</strong>{_chip("good", "ready")}'
        f'<span class="lm-muted" role="status">{facts}</span>{toy}</div>'
    )


def _chip(kind: str, text: str) -> str:
    return f'<span class="lm-chip {kind}">{text}</span>'


def progress_bar(share: float, label: str) -> str:
    """A thin bar; `label` says what of."""
    done = f'<i class="hit" style="width:{100 * share:.1f}%"></i>'
    return (
        f'<div class="lm-bar thin" role="progressbar" aria-label="{escape(label)}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{100 * share:.0f}">{done}</div>'
    )


def message_html(text: str, good: bool) -> str:
    """A sentence for the user; nothing when there is nothing to say."""
    if not text:
        return ""
    name, role = ("lm-good", "status") if good else ("lm-alert", "alert")
    return f'<p class="{name}" role="{role}">{escape(text)}</p>'


def news_html(status: EngineStatus) -> str:
    """What only a screen reader is told, when it changes: the lines that show the same move too often."""
    return f'<p class="lm-hidden" role="status">{escape(words.improvement_news(status))}</p>'


def share_html(status: EngineStatus, answering: bool = False) -> str:
    """What the budget buys, and what the model is; nothing while it loads."""
    if status.phase == "error":
        return message_html(status.error, False)
    if status.info is None or status.plan is None or status.footprint is None:
        return f'<p class="lm-muted">The model is loading: {escape(words.progress(status.progress)[0])}.</p>'
    info, plan = status.info, status.plan
    facts = [
        ("Architecture", info.architecture), ("Device", info.device), ("Computed in", info.dtype),
        ("Draft", info.draft), ("Copies", words.link(info.link)), ("Context", f"{info.context:,} tokens"),
        ("Exactness", info.exactness), ("Steps", info.passes),
    ]  # fmt: skip
    if not info.has_chat_template:
        facts.append(("Chat template", "none: messages are given to the model as plain text"))
    improvement = words.improvement(status, answering)
    if improvement:
        facts.insert(4, ("Better draft", improvement))  # after the draft that there is
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    share = words.expert_share(plan, status.footprint, info.device)
    return f'<p class="lm-share">{escape(share)}</p><dl class="lm-facts">{rows}</dl>'
