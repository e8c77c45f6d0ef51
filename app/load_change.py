"""What a change of the settings for loading needs, and what is said of it. Changes nothing."""

from __future__ import annotations

from dataclasses import replace

from app.engine_holder import EngineHolder
from app.settings import AnswerSettings, LoadSettings
from localmoe.core.errors import LocalMoeError


def takes_live(
    holder: EngineHolder, before: LoadSettings, wanted: LoadSettings, answers: AnswerSettings
) -> bool:
    """Whether these settings need no load. before: those that were applied last.

    Raises:
        ConfigError: one is out of range.
    """
    config, loaded, status = wanted.engine_config(answers), holder.config, holder.status()
    drafter = loaded.drafter if status.drafts_alike(config.drafter) else config.drafter
    live = replace(
        config, vram_budget_bytes=loaded.vram_budget_bytes, improve_draft=loaded.improve_draft,
        draft_length=loaded.draft_length, policy=loaded.policy, drafter=drafter,
    )  # fmt: skip
    has_draft = config.draft_length == 0 or loaded.draft_length != 0
    same = wanted.model.strip() == before.model and live == loaded
    if status.info is not None and status.info.may_be_in_place and status.plan is not None:
        same = same and status.plan.in_place == (config.vram_budget_bytes is None)
    if not same or not has_draft or status.phase != "ready":
        return False
    try:
        return holder.engine().takes_budget(config.vram_budget_bytes)
    except LocalMoeError:  # as would a load; changing the budget says so and leaves all as it is
        return True


def differs_in_better_draft_alone(holder: EngineHolder, before: LoadSettings, wanted: LoadSettings) -> bool:
    """Whether the switch of the better draft is all that changes in a model that is loaded or loading."""
    switched = replace(before, better_draft=wanted.better_draft)
    return wanted == switched != before and holder.status().phase != "error"


def better_draft_sentence(holder: EngineHolder, *, on: bool) -> str:
    """What comes of the switch of the better draft."""
    if not on:
        return "Saved: no better draft is built; what was finished of one is kept."
    try:
        reason = holder.engine().why_no_better_draft()
    except LocalMoeError:
        reason = ""  # it is still loading
    if reason:
        return f"Saved. There is nothing to build for this model now: {reason}."
    return "Saved: a better draft is built in the pauses between answers."
