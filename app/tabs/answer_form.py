"""The settings that hold from the next answer on; kept as soon as the user is done with one. Checks nothing
itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.service import ChatService
from app.settings import AnswerSettings
from app.status_html import message_html
from app.tabs.answer_edits import Shown, as_shown, changed_elsewhere, keep_sound
from app.tabs.form_memory import FormMemory
from app.tabs.preset_row import PresetRow, connect_preset_row, create_preset_row, preset_values
from app.tabs.sampling_row import SamplingRow, create_sampling_row, held_of, settle
from app.texts import texts_for
from app.view import Updates, View, in_sight
from app.words import THINKING
from localmoe.core.config import MAX_DRAFT_LENGTH
from localmoe.core.errors import LocalMoeError
from localmoe.prefetch.registry import POLICIES

if TYPE_CHECKING:
    from app.screen import Screen

_DRAFT_CHOICES = [("Auto", "auto"), ("Off", "off"), ("Fixed", "fixed")]
_THINKING_CHOICES = [(label, thinking) for thinking, label in THINKING.items()]
_USUAL_DRAFT_LENGTH = 4  # what "Fixed" starts with


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The widgets; `saved` says what came of a change of a control, `memory` is what the page knows of the
    form."""

    system_prompt: gr.Textbox
    draft_mode: gr.Radio
    draft_length: gr.Number
    thinking: gr.Dropdown
    sampling: SamplingRow
    policy: gr.Dropdown
    strict: gr.Checkbox
    show_drafted: gr.Checkbox
    approximate: gr.Checkbox
    prompts: PresetRow
    samplings: PresetRow
    saved: gr.HTML
    memory: gr.State

    def settings(self, values: Sequence[Any]) -> dict[str, Any]:
        """The settings that the values of `fields` mean, by their names."""
        mode, length, *plain = values
        draft = {"auto": "auto", "off": 0}.get(mode, length)
        return {**dict(zip(self.plain_fields(), plain, strict=True)), "draft_length": draft}

    def plain_fields(self) -> dict[str, Any]:
        """Widgets by the name of their setting, but for the draft length, which has two."""
        sampling = (
            "own_sampling", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "repetition_penalty",
            "seed",
        )  # fmt: skip
        return {
            "system_prompt": self.system_prompt,
            "thinking": self.thinking,
            **{name: getattr(self.sampling, name) for name in sampling},
            **{name: getattr(self, name) for name in ("policy", "strict", "show_drafted", "approximate")},
        }

    def fields(self) -> list[Any]:
        """All inputs."""
        return [self.draft_mode, self.draft_length, *self.plain_fields().values()]


def create_answer_form() -> AnswerForm:
    """Lay the widgets out; their values come when a page opens."""
    with gr.Group(elem_classes=["lm-group"]):
        gr.HTML(
            "<h2>Answers</h2><p>Kept at once; they hold from the next answer on.</p>", apply_default_css=False
        )
        prompts = create_preset_row("prompt", "Saved system prompts")
        system_prompt = gr.Textbox(
            "", label="System prompt", lines=2, max_lines=8, elem_id="lm-system",
            info="Given to the model before every chat. Empty: none.",
        )  # fmt: skip
        thinking = gr.Dropdown(
            _THINKING_CHOICES, value="auto", label="Thinking", elem_id="lm-thinking",
            info="Whether, or how much, a reasoning model thinks before it answers, as far as it lets one "
            "choose. Without thoughts an answer comes sooner.",
        )  # fmt: skip
        with gr.Row():
            draft_mode = gr.Radio(
                _DRAFT_CHOICES, value="auto", label="Draft length", elem_id="lm-draft",
                info="How many tokens the draft writes ahead. It changes the speed, never the quality.",
            )  # fmt: skip
            draft_length = gr.Number(
                _USUAL_DRAFT_LENGTH, label="Drafted tokens a step", elem_id="lm-draft-length",
                info=f"1 to {MAX_DRAFT_LENGTH}", visible="hidden",
            )  # fmt: skip
        samplings = create_preset_row("sampling", "Saved sampling settings")
        sampling = create_sampling_row()
        with gr.Accordion("Advanced", open=False):
            policy = gr.Dropdown(
                list(POLICIES), value=AnswerSettings().policy, label="Prefetch policy", elem_id="lm-policy",
                info="Which experts are fetched, and when. It changes the speed, never the answer.",
            )  # fmt: skip
            strict = gr.Checkbox(
                False, label="Strict", elem_id="lm-strict",
                info="The same bits whatever the settings and the timing: no experts are computed on the "
                "CPU. Slower where a model does not fit into VRAM.",
            )  # fmt: skip
            show_drafted = gr.Checkbox(
                False, label="Colour what the draft wrote", elem_id="lm-show-drafted",
                info="Marks the text of drafted tokens that the model accepted; answers are then shown "
                "without formatting.",
            )  # fmt: skip
            approximate = gr.Checkbox(
                False, label="Approximate answers", elem_id="lm-approximate",
                info="Written by the low-bit draft alone, which nothing verifies: faster, and not the "
                "model's own words. Every such answer says so.",
            )  # fmt: skip
        saved = gr.HTML("", apply_default_css=False, elem_id="lm-saved")
    return AnswerForm(
        system_prompt, draft_mode, draft_length, thinking, sampling, policy, strict, show_drafted,
        approximate, prompts, samplings, saved, gr.State(None),
    )  # fmt: skip


def answer_values(form: AnswerForm, service: ChatService) -> Updates:
    """What the form shows when a page opens."""
    answers = service.answers
    return {
        **_filled(form, answers, ["draft_length", *form.plain_fields()]),
        **preset_values(form.prompts, service),
        **preset_values(form.samplings, service),
        form.memory: FormMemory(Shown.of(answers)),
    }


def followed_answers(
    form: AnswerForm, service: ChatService, memory: FormMemory[Shown] | None, values: Sequence[Any]
) -> Updates:
    """What the form shows otherwise once settings were changed elsewhere; what its user is changing stays.

    Args:
        values: of `fields`.
    """
    if memory is None:  # the connection was lost for long
        return {form.memory: FormMemory(Shown.of(service.answers))}
    with memory.lock:
        now = service.answers
        names = changed_elsewhere(form.settings(values), memory.known.kept, now)
        memory.known = memory.known.follow(now, names)
    return {**_filled(form, now, names), form.memory: gr.skip()}


def _filled(form: AnswerForm, answers: AnswerSettings, names: Sequence[str]) -> Updates:
    """The widgets of these settings."""
    shown, plain = as_shown(answers), form.plain_fields()
    updates: Updates = {plain[name]: shown[name] for name in names if name in plain}
    if "draft_length" in names:
        length = answers.draft_length
        mode = "auto" if length == "auto" else "off" if length == 0 else "fixed"
        fixed = length if isinstance(length, int) and length > 0 else _USUAL_DRAFT_LENGTH
        updates[form.draft_mode] = mode
        updates[form.draft_length] = gr.Number(value=fixed, visible=in_sight(mode == "fixed"))
    return updates


def connect_answer_form(form: AnswerForm, screen: Screen) -> None:
    """Attach the one listener of the form: it runs once at a time, and last with the newest values."""

    service = screen.service
    connect_preset_row(form.prompts, form, screen)
    connect_preset_row(form.samplings, form, screen)

    def handle_change(
        view: View, memory: FormMemory[Shown] | None, mode: str, length: float | None, *plain: Any
    ) -> Updates:
        memory, said = memory or FormMemory(Shown.of(service.answers)), form.settings([mode, length, *plain])
        with memory.lock:
            wanted = settle(said, memory.known.held)
            memory.known = replace(memory.known, held=held_of(wanted))
            try:
                memory.known, message, refusal = keep_sound(service, wanted, memory.known)
            except LocalMoeError as error:
                message, refusal = "", str(error)
        switch = gr.skip() if wanted["own_sampling"] == said["own_sampling"] else wanted["own_sampling"]
        return {
            form.saved: message_html(texts_for(view.language)(refusal or message), not refusal),
            form.draft_length: gr.Number(visible=in_sight(mode == "fixed")),
            form.sampling.own_sampling: switch,
            form.memory: memory,
        }

    gr.on(
        [event for widget in form.fields() for event in user_edits(widget)], handle_change,
        [screen.view, form.memory, *form.fields()],
        [form.saved, form.draft_length, form.sampling.own_sampling, form.memory],
        queue=False, show_progress="hidden", api_visibility="private", trigger_mode="always_last",
    )  # fmt: skip


def user_edits(widget: Any) -> list[Any]:
    """When the user is done with a control."""
    chosen = isinstance(widget, gr.Radio | gr.Dropdown | gr.Checkbox)
    return [widget.input] if chosen else [widget.blur, widget.submit]
