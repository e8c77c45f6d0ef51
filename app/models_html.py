"""The Models tab's lists as HTML: cards of models with their fit, and the download queue. All is escaped;
asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.models.queue_file import Download
from app.status_html import action_button as button
from app.status_html import progress_bar
from app.texts import Texts
from app.words import percent
from localmoe.core.model_facts import Fit, ModelFacts
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_bytes, format_count, format_seconds
from localmoe.hardware.facts import Hardware

WAYS_ON = {
    "HubUnreachableError": "No connection to the Hub: check the network, then try again.",
    "RepoNotFoundError": "There is no such model, or it is private: check its name, or give a token.",
    "GatedModelError": "This model is gated: ask for access on its page of the Hub, then give a token.",
    "DiskFullError": "The disk is full: delete a model you no longer need, or free some space, then go on.",
    "UnsupportedModelError": "localmoe cannot run this model: choose another one.",
    "DownloadError": "The download failed.",
}


def failure_html(kind: str, text: str, t: Texts) -> str:
    """What went wrong in plain words, and the details."""
    plain = t(WAYS_ON[kind]) if kind in WAYS_ON else ""
    details = f"<small>{escape(text)}</small>" if plain else escape(text)
    return f'<p class="lm-alert" role="alert">{escape(plain)} {details}</p>'


def size_facts(footprint: ModelFootprint, num_bytes: int, licence: str, t: Texts) -> str:
    """ "14.3 B parameters, 2.7 B a token · 26.7 GiB · 8,192 tokens of context · text only · apache-2.0" """
    parts = [
        t("{total} parameters, {active} a token", total=format_count(footprint.total_params),
          active=format_count(footprint.active_params)),
        format_bytes(num_bytes),
        t("{count} tokens of context", count=f"{footprint.max_context:,}"),
    ]  # fmt: skip
    if footprint.text_alone:
        parts.append(t("text only"))
    if licence:
        parts.append(licence)
    return escape(" · ".join(parts))


def fit_html(fit: Fit | None, t: Texts) -> str:
    """Whether it fits, in tiers, or runs from the disk; an estimate says that it is one."""
    if fit is None:
        return f'<p class="lm-fit wait">{escape(t("looking at this computer"))}</p>'
    if not fit.fits:
        return f'<p class="lm-fit no"><b>{escape(t("Does not fit now."))}</b> {escape(fit.reason)}</p>'
    if fit.disk_bytes:
        return _from_disk(fit, t)
    tiers = [f"{format_bytes(fit.ram_bytes)} {t('RAM')}"]
    if fit.vram_bytes:
        tiers.insert(0, f"{format_bytes(fit.vram_bytes)} {t('VRAM')}")
    text = " + ".join(tiers)
    speed = ""
    if fit.tokens_per_s is not None:
        rate = f"{fit.tokens_per_s:.0f}" if fit.tokens_per_s >= 10 else f"{fit.tokens_per_s:.1f}"
        hint = t("An estimate from measured memory and link rates, and an upper limit: not a measurement.")
        estimate = t("est. at most {rate} tok/s", rate=rate)
        speed = f', <span class="lm-est" title="{escape(hint)}">{escape(estimate)}</span>'
    draft = "" if fit.drafting else f" · {escape(t('without a draft'))}"
    return f'<p class="lm-fit yes"><b>{escape(t("Fits"))}:</b> {escape(text)}{speed}{draft}</p>'


def _from_disk(fit: Fit, t: Texts) -> str:
    """No speed: it is the disk's, which is not measured."""
    head = t("Fits, with its experts on the disk")
    if fit.ram_share < 1:
        head = t("Does not fit into RAM; runs from the disk, slower")
    share = t("{share} of the experts", share=percent(fit.ram_share))
    parts = [f"{format_bytes(fit.ram_bytes)} {t('RAM')} ({share})"]
    if fit.vram_bytes:
        parts.insert(0, f"{format_bytes(fit.vram_bytes)} {t('VRAM')}")
    size = format_bytes(fit.disk_bytes)
    parts.append(t("{size} on the disk already", size=size) if fit.disk_is_written else
                 t("{size} on the disk", size=size))  # fmt: skip
    draft = "" if fit.drafting else f" · {escape(t('without a draft'))}"
    return f'<p class="lm-fit disk"><b>{escape(head)}:</b> {escape(" + ".join(parts))}{draft}</p>'


def machine_html(hardware: Hardware | None, t: Texts) -> str:
    """What was detected."""
    if hardware is None:
        return f'<p class="lm-muted">{escape(t("looking at this computer"))}</p>'
    free = t("{free} of {total} free", free="{free}", total="{total}")
    parts = [
        f"{gpu.name}: " + free.format(free=format_bytes(gpu.free_bytes), total=format_bytes(gpu.total_bytes))
        for gpu in hardware.gpus
    ] or [t("no GPU that can be used")]
    ram = free.format(
        free=format_bytes(hardware.ram_available_bytes), total=format_bytes(hardware.ram_total_bytes)
    )
    parts += [f"{t('RAM')}: {ram}", t("disk: {free} free", free=format_bytes(hardware.disk_free_bytes))]
    return f'<p class="lm-machine"><b>{escape(t("This computer"))}</b> {escape(" · ".join(parts))}</p>'


def card(title: str, facts: str, body: str, buttons: str, *, grey: bool = False, badge: str = "") -> str:
    """One model. `title` is text, the rest HTML."""
    chip = f'<span class="lm-chip">{escape(badge)}</span>' if badge else ""
    return (
        f'<li class="lm-model{" grey" if grey else ""}" data-model="{escape(title)}">'
        f'<div class="lm-model-head"><h4>{escape(title)}</h4>{chip}</div>'
        f'<p class="lm-muted">{facts}</p>{body}<div class="lm-acts">{buttons}</div></li>'
    )


def cards(items: Sequence[str], label: str) -> str:
    """A list of cards."""
    return f'<ul class="lm-models" aria-label="{escape(label)}">{"".join(items)}</ul>' if items else ""


def chat_button(name: str, fit: Fit | None, t: Texts) -> str:
    """Load a model of this computer, from where its card says."""
    return _leading(t("Chat"), "chat", name, fit, t)


def _leading(text: str, act: str, name: str, fit: Fit | None, t: Texts) -> str:
    """A button that leads to the chat. One that lets a model be loaded from the disk says so."""
    label = f"{text} {name}"
    if fit is not None and fit.fits and fit.disk_bytes:
        text, act = f"{text} ({t('from the disk')})", f"{act}-disk"
        label = f"{text} {name}"
    return button(text, act, name, kind="primary", label=label)


def get_buttons(repo_id: str, here: bool, waiting: Download | None, fit: Fit | None, t: Texts) -> str:
    """What can be done with a model of the Hub."""
    if here:
        return chat_button(repo_id, fit, t)
    if waiting is not None and waiting.state != "failed":  # which may be of a commit that is gone
        return f'<span class="lm-muted">{escape(t("in the download queue"))}</span>'
    chat = _leading(t("Get and chat"), "get-chat", repo_id, fit, t)
    return chat + button(t("Only download"), "get", repo_id, label=f"{t('Only download')} {repo_id}")


def found_facts(facts: ModelFacts, t: Texts) -> str:
    """The line of sizes of a model of the Hub."""
    gated = f" · {escape(t('gated'))}" if facts.gated else ""
    return size_facts(facts.footprint, facts.num_bytes, facts.licence, t) + gated


_STATES = {
    "queued": "waiting", "running": "downloading", "paused": "paused", "failed": "stopped by an error",
    "cancelled": "being deleted", "done": "here",
}  # fmt: skip


def queue_html(downloads: Sequence[Download], t: Texts) -> str:
    """The queue; nothing where it is empty."""
    if not downloads:
        return ""
    rows = "".join(_download(download, t) for download in downloads)
    heading = escape(t("Downloads"))
    return f'<h3>{heading}</h3><ul class="lm-models lm-queue" aria-label="{heading}">{rows}</ul>'


def _download(download: Download, t: Texts) -> str:
    share = download.done_bytes / download.total_bytes if download.total_bytes else 0.0
    parts = [t(_STATES[download.state])]
    if download.total_bytes:
        done, total = format_bytes(download.done_bytes), format_bytes(download.total_bytes)
        parts.append(t("{done} of {total}", done=done, total=total) + f" ({100 * share:.0f} %)")
    if download.state == "running" and download.rate:
        parts.append(t(download.rate))
    if download.state == "running" and download.seconds_left is not None and share < 1:
        parts.append(t("about {time} left", time=format_seconds(download.seconds_left)))
    if download.then_chat and download.state != "failed":
        from_disk = t("then it is loaded, with experts on the disk")
        parts.append(from_disk if download.from_disk else t("then it is loaded"))
    if download.role == "draft":
        parts.append(t("ready-made draft for {model}", model=download.for_model))
    error = failure_html(download.error_kind, download.error, t) if download.state == "failed" else ""
    bar = progress_bar(min(1.0, share), f"{t('downloading')} {download.repo_id}")
    return (
        f'<li class="lm-model" data-model="{escape(download.repo_id)}" data-state="{download.state}">'
        f'<div class="lm-model-head"><h4>{escape(download.repo_id)}</h4></div>'
        f'<p class="lm-muted lm-amount">{escape(" · ".join(parts))}</p>{bar}{error}'
        f'<div class="lm-acts">{_download_buttons(download, t)}</div></li>'
    )


def _download_buttons(download: Download, t: Texts) -> str:
    key, name = download.id, download.repo_id
    texts = {"running": ("Pause", "pause"), "queued": ("Pause", "pause"), "paused": ("Go on", "resume"),
             "failed": ("Try again", "resume")}  # fmt: skip
    if download.state not in texts:
        return ""
    text, act = texts[download.state]
    first = button(t(text), act, key, kind="" if act == "pause" else "primary", label=f"{t(text)} {name}")
    # one that runs may have brought something since it was last told of
    sure = t("Delete what has arrived?") if download.done_bytes or download.state == "running" else ""
    return first + button(t("Cancel"), "cancel", key, sure=sure, label=f"{t('Cancel')} {name}")
