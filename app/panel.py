"""The live panel as HTML, from snapshots alone. Every number comes from statistics that the
engine measured; nothing here is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app import words
from app.cache_card import cache_card
from app.cards import bar, card, fact, legend
from app.engine_status import EngineStatus
from app.jobs import JobView
from app.status_html import progress_bar
from app.texts import ENGLISH, Texts
from localmoe.core.live_state import ReuseBound
from localmoe.core.stats import GenerationStats
from localmoe.core.units import format_bytes, format_rate

_OWNERS = ("shared", "draft", "kv", "slots", "workspace", "reserve")
_OWNER_NAMES = {
    "shared": "shared weights", "draft": "low-bit draft", "kv": "KV cache", "slots": "expert slots",
    "workspace": "workspace", "reserve": "kept free for activations", "mtp": "MTP layer",
}  # fmt: skip
_SPARK_WIDTH, _SPARK_HEIGHT = 240, 44
_ASIDE = (
    "The draft is laid aside: answers are faster with experts in its memory. A fixed draft length brings it "
    "back."
)


_OWNER_HINTS = {
    "shared": "everything but the routed experts: attention, embeddings, routers, shared experts",
    "draft": "the small copy of the experts that proposes tokens; in device memory whole or not at all",
    "mtp": "the layer that the model was trained with to predict one token more: it proposes tokens",
    "kv": "keys and values of the conversation so far",
    "slots": "room for 16-bit experts; the more, the fewer copies",
    "workspace": "memory for what is computed in between",
    "reserve": "memory for what is computed in between, which slots do not take",
}


def panel_html(
    status: EngineStatus, job: JobView | None, t: Texts = ENGLISH, bound: ReuseBound | None = None
) -> str:
    """The whole panel; dashes until something was measured. bound: of the last answer."""
    stats = job.stats if job is not None else None
    running = job is not None and job.finish is None
    state = t("answering") if running else t("last answer") if job is not None else t("no answer yet")
    if stats is not None and stats.approximate:
        state += f" · {t('approximate')}"
    return (
        f'<div class="lm-panel"><div class="lm-panel-head"><h2>{escape(t("Live"))}</h2>'
        f'<span class="lm-dot{" on" if running else ""}">{state}</span></div>'
        f"{_speed(stats, job.speeds if job is not None else (), t)}"
        f"{_cache(status, stats, None if running else bound, t)}"
        f"{_draft(status, job, t)}{_memory(status, t)}{_ram(status, t)}{_copies(status, stats, t)}</div>"
    )


def _speed(stats: GenerationStats | None, speeds: Sequence[float], t: Texts) -> str:
    tokens = words.rate(stats.tokens_per_s if stats else None)
    unit = escape(t("tokens/s"))
    hint = escape(t("tokens written a second, after the first one"))
    big = (
        f'<div class="lm-big" role="group" aria-label="{escape(t("Speed"))}" title="{hint}">'
        f'<b data-key="tokens_per_s">{tokens}</b><span>{unit}</span></div>'
    )
    facts = fact(
        t("First token"), words.seconds(stats.ttft_s if stats else None), "ttft",
        t("time from pressing Send to the first token: the prompt is read in it"),
    )  # fmt: skip
    facts += fact(
        t("Tokens"), f"{stats.new_tokens:,}" if stats else words.NONE, "new_tokens",
        t("tokens of the answer so far; a token is about four letters of English"),
    )  # fmt: skip
    read = words.NONE
    if stats:
        read = t(
            "{count} ({reused} reused)", count=f"{stats.prompt_tokens:,}", reused=f"{stats.reused_tokens:,}"
        )
    facts += fact(
        t("Prompt"),
        read,
        "prompt",
        t("tokens of the prompt; reused: read in an earlier turn, and kept since"),
    )
    return card(t("Speed"), big + _sparkline(speeds, t) + facts, "speed")


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


def _cache(status: EngineStatus, stats: GenerationStats | None, bound: ReuseBound | None, t: Texts) -> str:
    if status.plan is not None:
        from_disk = status.plan.disk_bytes > 0 and status.plan.in_place
    else:  # the last answer is shown, and its model is loaded no more
        from_disk = stats is not None and stats.disk_bytes > 0 and not stats.h2d_bytes
    # the bound is one of copies
    return cache_card(stats, None if from_disk else bound, t, from_disk=from_disk)


def _draft(status: EngineStatus, job: JobView | None, t: Texts) -> str:
    stats = job.stats if job is not None else None
    answering = job is not None and job.finish is None
    now = job.draft_length if job is not None and answering else None
    length = stats.mean_draft_length if stats else None
    facts = fact(
        t("Accepted"), words.percent(stats.acceptance_rate if stats else None), "acceptance",
        t("share of the drafted tokens that the 16-bit model agreed with"),
    )  # fmt: skip
    facts += fact(
        t("Draft length now"), words.NONE if now is None else f"{now:.0f}", "draft_length_now",
        t("tokens of the draft checked in the last step; with the length on auto it follows what pays"),
    )  # fmt: skip
    facts += fact(
        t("Mean draft length"), words.NONE if length is None else f"{length:.1f}", "draft_length",
        t("tokens of the draft that one pass of the 16-bit model checks in a step"),
    )  # fmt: skip
    proposed = stats.drafted + stats.left_out if stats else 0
    facts += fact(
        t("Left out"), words.percent(stats.left_out / proposed if stats and proposed else None), "left_out",
        t("share of what the draft proposed that was not checked, as the draft itself was unsure of it"),
    )  # fmt: skip
    facts += fact(
        t("Looked up"), words.percent(stats.looked_up / stats.drafted if stats and stats.drafted else None),
        "looked_up", t("share of the checked tokens that were found further up in the text, not drafted"),
    )  # fmt: skip
    facts += fact(
        t("Expert match"), words.percent(stats.expert_match_rate if stats else None), "expert_match",
        t("share of (token, layer) where draft and target chose the same experts"),
    )  # fmt: skip
    if status.plan is not None and status.plan.draft_aside:
        facts += f'<p class="lm-muted">{escape(t(_ASIDE))}</p>'
    return card(t("Drafting"), facts + _improvement(status, answering, t), "draft")


def _improvement(status: EngineStatus, answering: bool, t: Texts) -> str:
    """A better draft while it is built; it is no live region, as it moves all the time (see `news_html`)."""
    if status.improvement is None:
        return ""
    text = escape(words.improvement(status, answering, t))
    share = progress_bar(words.progress(status.improvement)[1], t("building a better draft"))
    name = escape(t("Better draft"))
    return f'<div class="lm-improvement" data-key="improvement"><b>{name}</b> {text}{share}</div>'


def _memory(status: EngineStatus, t: Texts) -> str:
    if status.plan is None or status.info is None:
        return card(t("Device memory"), bar([], t("nothing loaded")), "memory")
    budget = max(1, status.plan.budget_bytes)
    held = {owner: held_bytes for owner, held_bytes in status.memory.items() if held_bytes}
    text = t("{done} of {total}", done=format_bytes(sum(held.values())), total=format_bytes(budget))
    if "workspace" not in held:  # not held between two steps, but never given to slots either
        held["reserve"] = status.plan.workspace_bytes
    owners = sorted(held, key=lambda owner: _OWNERS.index(owner) if owner in _OWNERS else len(_OWNERS))
    shares = bar([(f"own-{owner}", held[owner] / budget) for owner in owners], text)
    parts = []
    for owner in owners:
        called = "mtp" if (owner, status.info.drafter) == ("draft", "mtp") else owner
        name, hint = t(_OWNER_NAMES.get(called, called)), t(_OWNER_HINTS.get(called, ""))
        parts.append((f"own-{owner}", name, format_bytes(held[owner]), hint))
    used = fact(t("Used"), text, "memory", t("held now, of the budget that you gave"))
    return card(words.memory_name(status.info.device, t), used + shares + legend(parts), "memory")


def _ram(status: EngineStatus, t: Texts) -> str:
    ram, plan = status.ram, status.plan
    if ram is None:
        return ""
    own = t("all experts, which are copied or computed from here, and the program itself")
    held = ""
    if plan is not None and plan.disk_bytes and status.footprint is not None:
        own = t("experts that were asked for of late, and the program itself; all lie on the disk")
        here, every = f"{plan.ram_experts:,}", f"{status.footprint.total_experts:,}"
        held = fact(
            t("Room for experts"), t("{done} of {total}", done=here, total=every), "ram_experts",
            t("how many RAM holds at a time; the others are read from the disk when they are asked for"),
        )  # fmt: skip
    text = t("{done} of {total}", done=format_bytes(ram.own + ram.others), total=format_bytes(ram.total))
    total = max(1, ram.total)
    shares = bar([("own-shared", ram.own / total), ("own-others", ram.others / total)], text)
    parts = (
        ("own-shared", "localmoe", format_bytes(ram.own), own),
        ("own-others", t("other programs"), format_bytes(ram.others),
         t("what they could give up at once, as files kept in memory, is not counted")),
    )  # fmt: skip
    used = fact(
        t("Used"), text, "ram", t("memory of this computer that is taken, at the last load or answer")
    )
    return card("RAM", used + shares + legend(parts) + held, "ram")


def _copies(status: EngineStatus, stats: GenerationStats | None, t: Texts) -> str:
    per_token = stats.h2d_bytes_per_token if stats else None
    facts = fact(
        t("This answer"), format_bytes(stats.h2d_bytes) if stats else words.NONE, "h2d",
        t("bytes of experts copied to device memory for this answer, its prompt included"),
    )  # fmt: skip
    facts += fact(
        t("Per token"), words.NONE if per_token is None else format_bytes(per_token), "h2d_token",
        t("the same for each token after the first one: what the link limits the speed by"),
    )  # fmt: skip
    facts += _read(status, stats, t)
    waited = t("time in which the model stood still for experts that were not in device memory")
    if status.plan is not None and status.plan.disk_bytes:
        waited = t("time in which the model stood still for experts that were not there")
    facts += fact(t("Waited for experts"), words.seconds(stats.stall_s if stats else None), "stall", waited)
    if stats and stats.cpu_jobs:
        hint = t("weights that the CPU read to compute experts, beside the copies")
        facts += fact(t("Read by the CPU"), format_bytes(stats.cpu_bytes), "cpu_bytes", hint)
    if status.info is not None:
        facts += fact(t("Through"), words.link(status.info.link, t), "link",
                      t("the way that experts take from RAM to device memory"))  # fmt: skip
    return card(t("Copied to the device"), facts, "copies")


def _read(status: EngineStatus, stats: GenerationStats | None, t: Texts) -> str:
    """What came from the disk, of a model whose experts lie there."""
    on_disk = status.plan is not None and status.plan.disk_bytes > 0
    if not on_disk and not (stats and stats.disk_bytes):
        return ""
    per_token = stats.disk_bytes_per_token if stats else None
    facts = fact(
        t("Read from the disk"), words.NONE if stats is None else _amount_read(stats), "disk",
        t("bytes of experts read from the disk for this answer, its prompt included, and how fast"),
    )  # fmt: skip
    return facts + fact(
        t("Read per token"), words.NONE if per_token is None else format_bytes(per_token), "disk_token",
        t("the same for each token after the first one: what the disk limits the speed by"),
    )  # fmt: skip


def _amount_read(stats: GenerationStats) -> str:
    amount = format_bytes(stats.disk_bytes)
    return f"{amount}, {format_rate(stats.disk_bytes / stats.disk_busy_s)}" if stats.disk_busy_s else amount
