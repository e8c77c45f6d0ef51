"""Puts the Models tab's sections together from the services' snapshots: suggestions, results, queue, this
computer's models, token. Changes nothing."""

from __future__ import annotations

from html import escape

from app.models.finder import Failure, Found
from app.models.judge import judge, judge_in_ram
from app.models.picture_settings import can_get_settings
from app.models.service import ModelsService
from app.models_html import (
    card,
    cards,
    chat_button,
    failure_html,
    fit_html,
    found_facts,
    get_buttons,
    machine_html,
    size_facts,
)
from app.status_html import action_button as button
from app.texts import Texts
from app.words import draft as draft_of
from app.words import progress
from localmoe.core.errors import ConfigError
from localmoe.core.model_facts import Fit, ModelFacts
from localmoe.core.units import format_bytes, format_count
from localmoe.engine import import_all
from localmoe.hub.local_models import LocalModel
from localmoe.hub.search import SearchHit
from localmoe.hub.token import token_hint
from localmoe.hub.unfinished import UnfinishedDownload


def suggestions_html(models: ModelsService, t: Texts) -> str:
    """What was detected, and a few models that fit."""
    hardware = models.fits.hardware()
    if hardware is None:
        return machine_html(None, t)
    import_all()  # the thread that looked at the machine has
    from localmoe.engine.suggestions import propose

    here = {model.name for model in models.shelf.view().models}
    items = []

    def left(facts: ModelFacts) -> int:
        return models.download_bytes(facts.footprint.name, facts)

    def in_ram(facts: ModelFacts) -> Fit:
        return judge_in_ram(models, facts, download_bytes=left(facts)) or Fit(False)

    # what runs from the disk is not proposed beside what fits; where nothing does, the smallest may run so
    for suggestion, _ in propose(in_ram):
        repo_id, known = suggestion.repo_id, suggestion.facts
        fit = judge(models, repo_id, known, download_bytes=left(known)) or Fit(False)
        buttons = get_buttons(repo_id, repo_id in here, models.queue.find(repo_id), fit, t)
        facts = found_facts(suggestion.facts, t)
        items.append(
            card(repo_id, facts, fit_html(fit, t), buttons, grey=not fit.fits, badge=t(suggestion.about))
        )
    heading = f"<h3>{escape(t('Models that fit this computer'))}</h3>"
    return f"{machine_html(hardware, t)}{heading}{cards(items, t('Models that fit this computer'))}"


def results_html(models: ModelsService, t: Texts) -> str:
    """What the search found."""
    found = models.finder.view()
    if found.phase == "idle":
        return ""
    heading = f"<h3>{escape(t('Found on the Hub'))}</h3>"
    if found.phase == "searching":
        return f'{heading}<p class="lm-muted" role="status">{escape(t("asking the Hub"))}</p>'
    if found.failure is not None:
        again = button(t("Search again"), "search-again", found.query)
        return heading + failure_html(found.failure.kind, found.failure.text, t) + again
    if not found.hits:
        nothing = escape(t("Nothing was found: try other words."))
        return f'{heading}<p class="lm-muted" role="status">{nothing}</p>'
    here = {model.name for model in models.shelf.view().models}
    items = [_hit(models, hit, found, here, t) for hit in _ordered(found)]
    return heading + cards(items, t("Found on the Hub"))


def _ordered(found: Found) -> list[SearchHit]:
    """What can run before what cannot."""
    return sorted(
        found.hits, key=lambda hit: bool(hit.refusal) or isinstance(found.facts.get(hit.repo_id), Failure)
    )


def _hit(models: ModelsService, hit: SearchHit, found: Found, here: set[str], t: Texts) -> str:
    known = found.facts.get(hit.repo_id)
    if isinstance(known, ModelFacts):
        left = models.download_bytes(hit.repo_id, known)
        fit = judge(models, hit.repo_id, known, download_bytes=left)
        buttons = get_buttons(hit.repo_id, hit.repo_id in here, models.queue.find(hit.repo_id), fit, t)
        return card(hit.repo_id, found_facts(known, t), fit_html(fit, t), buttons)
    parts = [hit.architecture] if hit.architecture else []
    if hit.num_params:
        parts.append(t("{total} parameters", total=format_count(hit.num_params)))
    parts += [hit.licence] if hit.licence else []
    parts += [t("gated")] if hit.gated else []
    facts = escape(" · ".join(parts))
    if isinstance(known, Failure):
        again = button(t("Try again"), "look-again", hit.repo_id)
        return card(hit.repo_id, facts, failure_html(known.kind, known.text, t), again, grey=True)
    if hit.refusal:
        reason = f'<p class="lm-fit no">{escape(t("Cannot be run"))}: {escape(hit.refusal)}.</p>'
        return card(hit.repo_id, facts, reason, "", grey=True)
    look = button(t("Does it fit?"), "look-again", hit.repo_id)
    return card(hit.repo_id, facts, "", look)


def shelf_html(models: ModelsService, t: Texts) -> str:
    """The models on this computer, and downloads that were begun elsewhere."""
    view = models.shelf.view()
    queued = {download.repo_id for download in models.queue.view()}
    items = [_local(models, model, view.facts_of(model.name), t) for model in view.models]
    items += [_unfinished(one, t) for one in view.unfinished if one.repo_id not in queued]
    items += [_left(name, size, t) for name, size in view.left if not models.uses_made_of(name)]
    heading = escape(t("On this computer"))
    return f"<h3>{heading}</h3>{cards(items, t('On this computer'))}"


def _local(models: ModelsService, model: LocalModel, known: ModelFacts | Failure | None, t: Texts) -> str:
    status = models.chats.holder.status()
    current = models.is_loaded(model.name, model.folder)
    badge = ""
    if current:
        badge = t("loaded") if status.phase == "ready" else t("loading")
    ready, fit = current and status.phase == "ready", None
    if isinstance(known, ModelFacts) and not ready:
        fit = judge(models, model.name, known)
    chat, delete = chat_button(model.name, fit, t), ""
    if ready:
        chat += button(t("Unload"), "unload", model.name, label=f"{t('Unload')} {model.name}")
    if can_get_settings(model) and models.queue.find(model.name) is None:
        text = t("Get its picture settings")
        chat += button(text, "get-settings", model.name, label=f"{text} {model.name}")
    if model.source in ("localmoe", "huggingface") and not current:
        sure = t("Delete and free {size}?", size=format_bytes(model.num_bytes + model.made_bytes))
        delete = button(t("Delete"), "delete", model.name, sure=sure, label=f"{t('Delete')} {model.name}")
    if model.record_bytes and not models.uses_made_of(model.name):
        text, sure = t("Delete the experts' file"), format_bytes(model.record_bytes)
        sure = t("Delete and free {size}?", size=sure)
        delete += button(text, "delete-records", model.name, sure=sure, label=f"{text} {model.name}")
    made = ""
    if model.made_bytes:
        made = f" · {escape(t('made of it: {size}', size=format_bytes(model.made_bytes)))}"
    if isinstance(known, Failure):
        reason = f'<p class="lm-fit no">{escape(known.text)}</p>'
        return card(model.name, format_bytes(model.num_bytes) + made, reason, delete, grey=True, badge=badge)
    if known is None:
        return card(model.name, format_bytes(model.num_bytes) + made, "", chat + delete, badge=badge)
    facts = size_facts(known.footprint, known.num_bytes, known.licence, t) + made
    body = _loaded_draft(models, t) if ready else fit_html(fit, t)
    return card(model.name, facts, body, chat + delete, badge=badge)


def _loaded_draft(models: ModelsService, t: Texts) -> str:
    """The draft of the loaded model, and how far a better one is."""
    status = models.chats.holder.status()
    assert status.info is not None
    text = t("Draft: {draft}", draft=draft_of(status, t))
    if status.improvement is not None:
        text += f" · {t('a better one is being built')}: {progress(status.improvement, t)[0]}"
    return f'<p class="lm-fit yes">{escape(text)}</p>'


def _unfinished(one: UnfinishedDownload, t: Texts) -> str:
    total = f" / {format_bytes(one.total_bytes)}" if one.total_bytes else ""
    facts = f"{escape(t('unfinished download'))}: {format_bytes(one.held_bytes)}{total}"
    sure = t("Delete and free {size}?", size=format_bytes(one.held_bytes))
    buttons = button(t("Go on"), "go-on", one.repo_id, kind="primary", label=f"{t('Go on')} {one.repo_id}")
    buttons += button(t("Delete"), "delete", one.repo_id, sure=sure, label=f"{t('Delete')} {one.repo_id}")
    return card(one.repo_id, facts, "", buttons)


def _left(name: str, num_bytes: int, t: Texts) -> str:
    """What was made of a model that is not listed."""
    size = format_bytes(num_bytes)
    text = t("{size} of drafts or experts, made of a model of a folder or one that is gone", size=size)
    sure = t("Delete and free {size}?", size=size)
    delete = button(t("Delete"), "delete-left", name, sure=sure, label=f"{t('Delete')} {name}")
    return card(name, escape(text), "", delete)


def token_html(t: Texts) -> str:
    """Whether there is a token; its last four characters at most."""
    try:
        hint = token_hint()
    except ConfigError as error:  # of a token that is none, or cannot be read: models on the disk need none
        return failure_html("", str(error), t)
    if not hint:
        return f'<p class="lm-muted">{escape(t("No token: models that are open to all need none."))}</p>'
    place, _, end = hint.partition(" ")
    forget = button(t("Forget it"), "forget-token", "token") if place == "localmoe" else ""
    text = t("A token that ends in {end} is used ({place}).", end=end, place=t(place))
    return f'<p class="lm-muted">{escape(text)} {forget}</p>'
