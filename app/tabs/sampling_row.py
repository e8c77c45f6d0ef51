"""How tokens are chosen: the switch for the model's own way, the numbers, and which of both an edit means.
Keeps nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.settings import SAMPLING_NUMBERS, AnswerSettings

HELD_NAMES = ("own_sampling", *SAMPLING_NUMBERS)
Held = tuple[Any, ...]  # of a form: these, as they were after its last edit


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The widgets; `own` says what the model's makers recommend."""

    own_sampling: gr.Checkbox
    own: gr.HTML
    temperature: gr.Number
    top_p: gr.Number
    top_k: gr.Number
    min_p: gr.Number
    max_new_tokens: gr.Number
    repetition_penalty: gr.Number
    seed: gr.Textbox


def create_sampling_row() -> SamplingRow:
    """Lay them out; their values come when a page opens."""
    own_sampling = gr.Checkbox(
        True, label="As the model's makers recommend", elem_id="lm-own-sampling",
        info="Instead of temperature, top-p, top-k, min-p and repetition penalty, where the model has a "
        "recommendation. Changing one of them switches this off.",
    )  # fmt: skip
    own = gr.HTML("", apply_default_css=False, elem_id="lm-own")
    with gr.Row():
        likeliest = "0: always the likeliest token"
        temperature = gr.Number(label="Temperature", step=0.1, elem_id="lm-temperature", info=likeliest)
        top_p = gr.Number(label="Top-p", step=0.05, elem_id="lm-top-p", info="1: off")
        top_k = gr.Number(label="Top-k", elem_id="lm-top-k", info="0: off")
        min_p = gr.Number(label="Min-p", step=0.01, elem_id="lm-min-p", info="0: off")
    with gr.Row():
        latest = "An answer ends here at the latest"
        max_new_tokens = gr.Number(label="Max new tokens", elem_id="lm-max", info=latest)
        penalty = gr.Number(label="Repetition penalty", step=0.05, elem_id="lm-repetition", info="1: off")
        seed = gr.Textbox("", label="Seed", elem_id="lm-seed", info="Empty: another one every time")
    return SamplingRow(own_sampling, own, temperature, top_p, top_k, min_p, max_new_tokens, penalty, seed)


def held_of(settings: Mapping[str, Any] | AnswerSettings) -> Held:
    """The switch and the numbers of these settings."""
    if isinstance(settings, AnswerSettings):
        return tuple(getattr(settings, name) for name in HELD_NAMES)
    return tuple(settings[name] for name in HELD_NAMES)


def settle(settings: Mapping[str, Any], held: Held) -> dict[str, Any]:
    """What a form's settings mean: its switch is off once a number was changed while it was on. Values are
    compared and no event is asked, as of several quick edits Gradio tells of one.

    Args:
        held: of the form, before it was edited.
    """
    own, *numbers = held
    changed = numbers != [settings[name] for name in SAMPLING_NUMBERS]
    return {**settings, "own_sampling": bool(settings["own_sampling"]) and not (own and changed)}
