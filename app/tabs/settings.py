"""The settings tab: what a load needs, and what holds from the next answer on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.service import ChatService
from app.tabs.answer_form import AnswerForm, answer_values, connect_answer_form, create_answer_form
from app.tabs.load_form import LoadForm, connect_load_form, create_load_form, load_values
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
        others = (answers.prompts.name, answers.samplings.name, answers.sampling.held)
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
    connect_load_form(widgets.load, screen)
    connect_answer_form(widgets.answers, screen)
