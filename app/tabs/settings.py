"""The settings tab: what a load needs, and what holds from the next answer on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.service import ChatService
from app.settings import LoadSettings
from app.tabs.answer_edits import Shown
from app.tabs.answer_form import (
    AnswerForm,
    answer_values,
    connect_answer_form,
    create_answer_form,
    followed_answers,
)
from app.tabs.form_memory import FormMemory
from app.tabs.load_form import LoadForm, connect_load_form, create_load_form, followed_load, load_values
from app.view import Updates

if TYPE_CHECKING:
    from app.screen import Screen


@dataclass(frozen=True, slots=True)
class SettingsWidgets:
    """The two forms."""

    load: LoadForm
    answers: AnswerForm

    def fields(self) -> list[Any]:
        """What is filled in when a page opens."""
        answers = self.answers
        others = (answers.prompts.name, answers.samplings.name, answers.memory)
        return [*self.load.fields(), *answers.fields(), *others]


def create_settings_tab() -> SettingsWidgets:
    """Lay both forms out."""
    with gr.Column(elem_id="lm-settings"):
        return SettingsWidgets(create_load_form(), create_answer_form())


def form_values(widgets: SettingsWidgets, service: ChatService) -> Updates:
    """What the forms show when a page opens."""
    return {**load_values(widgets.load, service), **answer_values(widgets.answers, service)}


def connect_settings_tab(widgets: SettingsWidgets, screen: Screen) -> None:
    """Attach the listeners."""
    load, answers, service = widgets.load, widgets.answers, screen.service
    connect_load_form(load, screen)
    connect_answer_form(answers, screen)

    choices = load.choices()

    def handle_kept(
        of_load: FormMemory[LoadSettings] | None, of_answers: FormMemory[Shown] | None, *values: Any
    ) -> Updates:
        """Settings were changed, maybe in another tab or window: the forms follow."""
        followed = followed_load(load, service, of_load, values[: len(choices)])
        told = {load.refilled: str(time.monotonic_ns())} if len(followed) > 1 else {}
        return {**followed, **told, **followed_answers(answers, service, of_answers, values[len(choices) :])}

    screen.widgets.kept.change(
        handle_kept, [load.memory, answers.memory, *choices, *answers.fields()],
        [*load.fields(), load.refilled, *answers.fields(), answers.memory],
        queue=False, show_progress="hidden", api_visibility="private", trigger_mode="always_last",
    )  # fmt: skip
