"""What the page's script is told of a look at the engine: cells of the expert map, sentences, the drawing
of a step. Looks at nothing itself."""

from __future__ import annotations

import base64

import numpy as np

from app import words
from app.live import Look
from app.texts import ENGLISH, Texts
from app.timeline_svg import last_step, step_svg, step_words
from localmoe.core.live_state import LiveState
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.units import format_rate

IN_SLOT = 0x80  # bit of a cell; the others are the heat, of HEAT_MAX
HEAT_MAX = 0x7F
_MOST_ASKED = 3  # experts that the words name


def live_json(
    look: Look | None, *, answering: bool, timeline: bool, t: Texts = ENGLISH, plan: MemoryPlan | None = None
) -> dict[str, object]:
    """For /live. cells: base64 of L x E bytes, row by row. here, away: where experts are. plan: of the model
    that was looked at."""
    if look is None:
        return {"layers": 0, "experts": 0, "cells": "", "words": t("nothing loaded"), "answering": False}
    layers, experts = look.state.resident.shape
    told: dict[str, object] = {
        "layers": layers, "experts": experts, "cells": cells(look.state),
        "words": map_words(look.state, t, in_ram=_in_ram(plan)),
        "answering": answering, **_link(look, t), **dict(zip(("here", "away"), places(plan, t), strict=True)),
    }  # fmt: skip
    if timeline:
        step = last_step(look.steps)
        told["step"] = "" if step is None else step_svg(step, t)
        told["stepWords"] = t("Recording: it shows with the next answer.")
        if step is not None:
            told["stepWords"] = step_words(step, t)
    return told


def cells(state: LiveState) -> str:
    """A byte an expert: IN_SLOT, and its heat in 0..HEAT_MAX."""
    heat = np.rint(HEAT_MAX * np.clip(state.heat, 0.0, 1.0)).astype(np.uint8)
    return base64.b64encode((heat | np.where(state.resident, IN_SLOT, 0).astype(np.uint8)).tobytes()).decode()


def places(plan: MemoryPlan | None, t: Texts = ENGLISH) -> tuple[str, str]:
    """Where experts are that are at hand, and where the others."""
    if plan is None or not plan.disk_bytes:
        return t("in a slot"), t("in RAM only")
    if _in_ram(plan):
        return t("in RAM"), t("on the disk only")
    return t("in a slot"), t("in RAM or on the disk")


def _in_ram(plan: MemoryPlan | None) -> bool:
    """Whether experts at hand are those that RAM holds of all that lie on the disk."""
    return plan is not None and plan.in_place and plan.disk_bytes > 0


def map_words(state: LiveState, t: Texts = ENGLISH, *, in_ram: bool = False) -> str:
    """The map for those who do not see it."""
    here, total = f"{int(state.resident.sum()):,}", f"{state.resident.size:,}"
    text = t("{here} of {total} experts are in slots.", here=here, total=total)
    if in_ram:
        text = t("{here} of {total} experts are in RAM.", here=here, total=total)
    hottest = np.argsort(-state.heat, axis=None, kind="stable")[:_MOST_ASKED]
    named = [
        t("layer {layer} expert {expert}", layer=layer, expert=expert)
        + f" ({words.percent(float(state.heat[layer, expert]))})"
        for layer, expert in (divmod(int(place), state.heat.shape[1]) for place in hottest)
        if state.heat[layer, expert] > 0
    ]
    return f"{text} {t('Asked for most: {names}.', names=', '.join(named))}" if named else text


def _link(look: Look, t: Texts) -> dict[str, object]:
    now, most = look.copied_bytes_per_s, look.state.link_bytes_per_s
    if now is None:
        return {"link": words.NONE, "linkShare": 0.0}
    if not most:
        return {"link": format_rate(now), "linkShare": 0.0}
    text = t("{now} of {most}", now=format_rate(now), most=format_rate(most))
    return {"link": text, "linkShare": min(1.0, now / most)}
