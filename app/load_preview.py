"""What settings of a load would buy and cost, in words: the planner's own answer for them, before anything is
loaded. Plans nothing itself and applies nothing."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Literal

from app import words
from app.models.finder import Failure
from app.models.fits import Fits
from app.models.service import ModelsService
from app.settings import LoadSettings
from app.status_html import action_button, message_html
from app.texts import Texts
from localmoe.core.config import EngineConfig
from localmoe.core.errors import LocalMoeError
from localmoe.core.model_facts import BudgetRange, Fit, ModelFacts
from localmoe.core.units import format_bytes, format_seconds
from localmoe.engine import import_all
from localmoe.hub.draft_places import find_homes, record_files


def facts_for(models: ModelsService, wanted: LoadSettings, config: EngineConfig) -> ModelFacts | None:
    """What the planner has to know of the model, with the draft that these settings ask for; None while it
    is looked at, and where only a load can tell whether it has an MTP layer."""
    hardware = models.fits.hardware()
    if hardware is None:
        return None
    import_all()  # the thread that looked at the machine has
    from localmoe.engine.drafts import DRAFT_BITS
    from localmoe.engine.fit import with_draft_bits
    from localmoe.engine.mtp_drafts import may_draft_unasked

    status, before = models.chats.holder.status(), models.chats.holder.config
    device: Literal["cpu", "cuda"] = "cuda" if hardware.gpus else "cpu"
    found = models.shelf.view().facts_of(_name(models, wanted))
    kept = found if isinstance(found, ModelFacts) else None
    loaded = status.footprint if status.model == wanted.model else None
    mtp = kept.mtp if kept is not None else None
    if kept is None and config.drafter == "mtp" != before.drafter:
        return None
    bits = DRAFT_BITS if config.drafter == "mtp" and mtp is not None else config.draft_bits
    drafts = [(one.drafter, one.draft_dir, one.draft_bits) for one in (config, before)]
    same_draft = drafts[0] == drafts[1]
    if loaded is not None and status.info is not None and (same_draft or kept is None):
        loaded = loaded.in_16_bits()
        bits_before = DRAFT_BITS if loaded.draft_model_bytes else before.draft_bits
        unsuited = "" if status.info.passes.startswith("whole steps") else status.info.passes
        unasked = status.info.drafter == "mtp" and may_draft_unasked(config, whole_passes=not unsuited)
        if config.drafter != "mtp" and (kept is not None or not unasked):
            loaded = replace(loaded, draft_model_bytes=0, draft_model_kv_bytes_per_token=0)
        weight_bytes = max(1, loaded.expert_bytes // max(1, loaded.expert_params))
        read_bytes = loaded.total_params * weight_bytes if kept is None else kept.num_bytes  # fewer of codes
        facts = ModelFacts(
            loaded, weight_bytes, read_bytes, unsuited,
            has_draft=kept is not None and kept.has_draft, mtp=mtp,
            record_files=_files_of(loaded.name),  # which this load may have written
        )  # fmt: skip
        return facts if same_draft else with_draft_bits(facts, bits, bits_before, device)
    return None if kept is None else with_draft_bits(kept, bits, device=device)


def _files_of(name: str) -> tuple[int, ...]:
    """Bytes of files of experts that are there now, of models of this name."""
    return tuple(size for home in find_homes(name) for size in record_files(home).values())


def is_known(models: ModelsService, wanted: LoadSettings) -> bool:
    """Whether the preview says all that it can; else it is worth asking again soon."""
    if models.fits.hardware() is None or not models.fits.measured:
        return False
    try:
        config = wanted.engine_config(models.chats.answers)
    except LocalMoeError:
        return True
    view = models.shelf.view()
    listed = any(wanted.model in (one.name, str(one.folder)) for one in view.models)
    if facts_for(models, wanted, config) is not None or _failure(models, wanted) is not None:
        return True
    return view.revision > 0 and not listed


def _failure(models: ModelsService, wanted: LoadSettings) -> Failure | None:
    """Why it cannot be told what the model needs."""
    found = models.shelf.view().facts_of(_name(models, wanted))
    return found if isinstance(found, Failure) else None


def _name(models: ModelsService, wanted: LoadSettings) -> str:
    """By which the model is listed, which may have been chosen by its folder."""
    listed = models.shelf.view().models
    return next((one.name for one in listed if str(one.folder) == wanted.model), wanted.model)


def budgets_for(models: ModelsService, wanted: LoadSettings) -> BudgetRange | None:
    """Between which budgets the slider moves; None where that is not known, or none works."""
    try:
        config = wanted.engine_config(models.chats.answers)
    except LocalMoeError:
        return None
    if models.fits.hardware() is None:
        return None
    facts = facts_for(models, wanted, config)
    return None if facts is None else models.fits.budgets(facts, config)


def preview_html(models: ModelsService, wanted: LoadSettings, t: Texts) -> str:
    """The consequence of these settings, and what applying them costs."""
    try:
        config = wanted.engine_config(models.chats.answers)
    except LocalMoeError as error:
        return message_html(str(error), False)
    if models.fits.hardware() is None:  # also: the engine is not imported yet
        return _muted(t("looking at this computer"))
    facts = facts_for(models, wanted, config)
    failure = _failure(models, wanted)
    if facts is None and failure is not None:
        return message_html(failure.text, False)
    if facts is None and is_known(models, wanted):  # it is not listed, and nobody will look at it
        return _muted(t("What these settings buy is known once the model is loaded with them."))
    if facts is None:
        return _muted(t("What these settings buy is known once the model has been looked at."))
    fit = models.fits.fit(facts, config=config)
    if fit is None:
        return _muted(t("looking at this computer"))
    if fit.plan is None or not fit.fits:
        button = ""
        if fit.budget_bytes is not None and wanted.model == models.chats.load_settings.model:
            text = t("Use {size}", size=format_bytes(fit.budget_bytes))
            button = action_button(text, "use-budget", str(fit.budget_bytes), kind="primary")
        return f'{message_html(fit.reason, False)}<div class="lm-acts">{button}</div>'
    room = _room(models.fits, facts, config, fit, t)
    return (
        f'<p class="lm-share" role="status">{escape(_consequence(fit, facts, config, t))}</p>'
        f"{_muted(_other_draft(models, wanted, facts, t))}{_muted(_file(fit, t))}"
        f"{_muted(room)}{_muted(_cost(models, wanted, facts, fit, t))}"
    )


def _muted(text: str) -> str:
    return f'<p class="lm-muted">{escape(text)}</p>' if text else ""


def _consequence(fit: Fit, facts: ModelFacts, config: EngineConfig, t: Texts) -> str:
    """ "38 % of the experts stay in VRAM (450 of 1,184), draft of 4 bits (1.2 GiB), ..." """
    plan = fit.plan
    assert plan is not None
    draft = t("no draft")
    if plan.drafting:
        bits = t("ready-made draft") if config.draft_dir is not None else ""
        if fit.by_mtp:
            bits = t("its MTP layer")
        bits = bits or t("draft of {bits} bits", bits=config.draft_bits)
        draft = f"{bits} ({format_bytes(plan.draft_bytes)})"
    elif plan.drafting_reason:
        draft += f" ({t(plan.drafting_reason)})"
    context = t(
        "context {count} tokens (KV cache {size})",
        count=f"{plan.context:,}",
        size=format_bytes(plan.kv_bytes),
    )
    parts = [words.expert_share(plan, facts.footprint, fit.device, t), draft, context]
    if fit.tokens_per_s is not None:
        parts.append(t("at most {rate} tok/s (predicted)", rate=words.rate(fit.tokens_per_s)))
    return "; ".join(parts)


def _has_mtp(facts: ModelFacts) -> bool:
    """Also where it is known by what the loaded model takes alone."""
    return facts.mtp is not None or facts.footprint.draft_model_bytes > 0


def _other_draft(models: ModelsService, wanted: LoadSettings, facts: ModelFacts, t: Texts) -> str:
    """Where the MTP layer is chosen: that there is none, or what it takes the place of."""
    if wanted.drafter != "mtp":
        return ""
    if not _has_mtp(facts):
        return t("This model has no MTP layer that can draft: it drafts as if that were not chosen.")
    now = models.chats.load_settings
    if now.draft and now.model == wanted.model:
        return t("The ready-made draft is not used any more then.")
    return ""


def _file(fit: Fit, t: Texts) -> str:
    """What experts on the disk take of it and of the speed."""
    if not fit.disk_bytes:
        return ""
    size = format_bytes(fit.disk_bytes)
    text = t("The file of all experts takes {size} of the disk.", size=size)
    if fit.disk_is_written:
        text = t("The file of all experts, {size}, is on the disk already.", size=size)
    if fit.ram_share < 1:
        slower = t("Answers are slower by the time that reading takes, which is not predicted.")
        return f"{text} {slower}"
    without = t("RAM has room for all of them: where they lie in RAM, no file is needed.")
    return f"{text} {without}"


def _room(fits: Fits, facts: ModelFacts, config: EngineConfig, fit: Fit, t: Texts) -> str:
    assert fit.plan is not None
    budgets = fits.budgets(facts, config)
    if budgets is None:
        return ""
    return t(
        "Budget {budget}; {free} of {total} would be free for it.",
        budget=format_bytes(fit.plan.budget_bytes), free=format_bytes(budgets.free_bytes),
        total=format_bytes(budgets.total_bytes),
    )  # fmt: skip


def _cost(models: ModelsService, wanted: LoadSettings, facts: ModelFacts, fit: Fit, t: Texts) -> str:
    """What Apply does; the time is that of the last load, by the bytes that both read."""
    if wanted == models.chats.load_settings and models.chats.holder.status().phase == "ready":
        return ""
    if models.chats.applies_live(wanted):
        return t("Apply changes this at once: nothing is loaded again.")
    status = models.chats.holder.status()
    size = format_bytes(facts.num_bytes)
    if fit.disk_bytes and not fit.disk_is_written:
        file = format_bytes(fit.disk_bytes)
        return t("Apply loads {size} again and writes a file of {file}.", size=size, file=file)
    if fit.disk_bytes:
        return t("Apply loads the model again, without its experts.")
    from_disk = status.plan is not None and status.plan.disk_bytes > 0  # it read less, or wrote a file
    if status.footprint is None or status.load_s <= 0 or from_disk:
        return t("Apply loads {size} again.", size=size)
    footprint = status.footprint
    if footprint.keeps_bf12:  # packed of what was read
        footprint = footprint.in_16_bits()
    weight_bytes = footprint.expert_bytes / max(1, footprint.expert_params)
    seconds = status.load_s * facts.num_bytes / max(1.0, footprint.total_params * weight_bytes)
    return t(
        "Apply loads {size} again: about {time} at the speed of the last load.",
        size=size, time=format_seconds(max(1.0, seconds)),
    )  # fmt: skip
