"""Sentences about the engine as HTML: the header, the facts under the settings, notices. All is escaped."""

from __future__ import annotations

from html import escape

from app import words
from app.engine_status import EngineStatus
from app.texts import ENGLISH, Texts
from app.unicode_text import whole_unicode
from localmoe.core.units import format_bytes

DEMO_NOTICE = "a tiny demo model; choose a real one under Models"


def header_html(status: EngineStatus, t: Texts = ENGLISH) -> str:
    """Model, state, and what the user can do about an error."""
    name = escape(status.info.name if status.info is not None else status.model)
    if status.phase == "error":
        way_on = t("Choose a model under Models, or change the budget under Settings.")
        alert = message_html(f"{t(status.error)} {way_on}", False)
        chip = _chip("bad", t("not loaded"))
        return f'<div class="lm-head"><strong>{name}</strong>{chip}{_remedies(status, t)}</div>{alert}'
    if status.phase == "loading":
        text, share = words.progress(status.progress, t)
        chip = _chip("busy", t("loading"))
        stop = action_button(t("Stop loading"), "stop-load", "load")
        return (
            f'<div class="lm-head"><strong>{name}</strong>{chip}'
            f'<span class="lm-muted" role="status">{escape(text)}</span>{stop}</div>'
            f"{progress_bar(share, t('loading'))}"
        )
    assert status.info is not None and status.plan is not None
    budget = t("{size} budget", size=format_bytes(status.plan.budget_bytes))
    sees = (t("reads pictures"),) if status.info.reads_images else ()
    facts = escape(" · ".join((status.info.device, budget, words.drafting(status, t), *sees)))
    toy = f'<span class="lm-muted">{escape(t(DEMO_NOTICE))}</span>' if status.model == "demo" else ""
    # of an answer that ran out of memory, and of settings that the disk did not take
    alert = message_html(t(status.error), False) + message_html(t(status.notice), False)
    return (
        f'<div class="lm-head"><strong>{name}</strong>{_chip("good", t("ready"))}'
        f'<span class="lm-muted" role="status">{facts}</span>{toy}{_remedies(status, t)}</div>{alert}'
    )


def _remedies(status: EngineStatus, t: Texts) -> str:
    """Buttons that load again with what the planner says would work."""
    buttons = ""
    if status.better_budget is not None:
        size = format_bytes(status.better_budget)
        text = t("Use {size}", size=size) if status.phase == "ready" else t("Use {size} and load", size=size)
        buttons += action_button(text, "use-budget", str(status.better_budget), kind="primary")
    if status.better_context is not None:
        text = t("Use a context of {count} tokens and load", count=f"{status.better_context:,}")
        buttons += action_button(text, "use-context", str(status.better_context), kind="primary")
    if status.runs_from_disk:
        buttons += action_button(t("Keep experts on the disk and load"), "use-disk", "load", kind="primary")
    return buttons


def action_button(text: str, act: str, key: str, *, kind: str = "", sure: str = "", label: str = "") -> str:
    """A button that the page's script turns into the event `act`, with `key`. sure: what it asks before
    that."""
    asks = f' data-sure="{escape(sure)}"' if sure else ""
    named = f' aria-label="{escape(label)}"' if label else ""
    return (
        f'<button type="button" class="lm-act {kind}" data-act="{act}" data-key="{escape(key)}"{asks}{named}>'
        f"{escape(text)}</button>"
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
    return f'<p class="{name}" role="{role}">{escape(whole_unicode(text))}</p>'  # it may quote what was typed


def news_html(status: EngineStatus, t: Texts = ENGLISH) -> str:
    """What only a screen reader is told, when it changes: the lines that show the same move too often."""
    return f'<p class="lm-hidden" role="status">{escape(words.improvement_news(status, t))}</p>'


def share_html(status: EngineStatus, answering: bool = False, t: Texts = ENGLISH) -> str:
    """What the budget buys, and what the model is; nothing while it loads."""
    if status.phase == "error":
        return message_html(t(status.error), False)
    if status.info is None or status.plan is None or status.footprint is None:
        how_far = words.progress(status.progress, t)[0]
        return f'<p class="lm-muted">{escape(t("The model is loading: {progress}.", progress=how_far))}</p>'
    info, plan = status.info, status.plan
    facts = [
        (t("Architecture"), info.architecture), (t("Device"), info.device), (t("Computed in"), info.dtype),
        (t("Draft"), words.draft(status, t)), (t("Copies"), words.link(info.link, t)),
        (t("Context"), t("{count} tokens", count=f"{info.context:,}")),
        (t("Exactness"), t(info.exactness)), (t("Steps"), t(info.passes)),
        (t("Lanes"), words.lanes(info.lanes, t)),
    ]  # fmt: skip
    if info.thinking:
        facts.append((t("Thinking"), ", ".join(t(words.THINKING[choice]) for choice in info.thinking)))
    if not info.has_chat_template:
        facts.append((t("Chat template"), t("none: messages are given to the model as plain text")))
    improvement = words.improvement(status, answering, t)
    if improvement:
        facts.insert(4, (t("Better draft"), improvement))  # after the draft that there is
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    share = words.expert_share(plan, status.footprint, info.device, t)
    return f'<p class="lm-share">{escape(share)}</p><dl class="lm-facts">{rows}</dl>'


def own_sampling_html(status: EngineStatus, t: Texts = ENGLISH) -> str:
    """What the makers of the loaded model recommend."""
    if status.info is None:
        return ""
    name, own = status.info.name, status.info.own_sampling
    if own is None:
        text = t("{model} has no recommendation: the numbers below are used.", model=name)
    else:
        text = t("For {model}: {sampling}.", model=name, sampling=words.sampling(own, t))
    return f'<p class="lm-muted">{escape(text)}</p>'
