"""A list of named settings with Save and Delete, above the controls that it fills in. Keeps nothing
itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.presets import Kind
from app.service import ChatService
from app.settings import check_answers
from app.status_html import message_html
from app.tabs.answer_edits import Shown, edited, keep_sound
from app.tabs.form_memory import FormMemory
from app.tabs.sampling_row import held_of, settle
from app.texts import texts_for
from app.view import Updates, View
from localmoe.core.errors import ConfigError, LocalMoeError

if TYPE_CHECKING:
    from app.screen import Screen
    from app.tabs.answer_form import AnswerForm


@dataclass(frozen=True, slots=True)
class PresetRow:
    """The widgets of one kind."""

    kind: Kind
    name: gr.Dropdown
    save: gr.Button
    delete: gr.Button
    said: gr.HTML  # what came of a click; the form's own place also tells of what the same click kept


def create_preset_row(kind: Kind, label: str) -> PresetRow:
    """Lay them out; the names come when a page opens."""
    with gr.Row(elem_classes=["lm-presets"]):
        name = gr.Dropdown(
            [], value=None, label=label, allow_custom_value=True, elem_id=f"lm-preset-{kind}", scale=1,
            info="Choose one, or type a new name and save.",
        )  # fmt: skip
        save = gr.Button("Save preset", elem_id=f"lm-save-{kind}", scale=0, min_width=110, size="sm")
        delete = gr.Button("Delete preset", elem_id=f"lm-delete-{kind}", scale=0, min_width=110, size="sm")
    said = gr.HTML("", apply_default_css=False, elem_id=f"lm-said-{kind}")
    return PresetRow(kind, name, save, delete, said)


def preset_values(row: PresetRow, service: ChatService, **shown: Any) -> Updates:
    """The names that there are. shown: `value`, where the field is to show another one."""
    names: Sequence[str] = service.presets.names(row.kind)
    return {row.name: gr.Dropdown(choices=list(names), **shown)}


def connect_preset_row(row: PresetRow, form: AnswerForm, screen: Screen) -> None:
    """Attach the listeners. What is chosen holds from the next answer on, as what is typed does."""
    service, plain = screen.service, form.plain_fields()

    def handle_choose(
        view: View, name: str | None, memory: FormMemory[Shown] | None, *values: Any
    ) -> Updates:
        preset = service.presets.values(row.kind, name or "")
        if preset is None:
            return {row.said: gr.skip()}  # a new name, to be saved, or a field that was only left
        if row.kind == "sampling":
            preset["own_sampling"] = False
        memory = memory or FormMemory(Shown.of(service.answers))

        def choose() -> str:
            memory.known, sentence, refusal = keep_sound(service, wanted, memory.known, also=tuple(preset))
            if not sentence:
                raise ConfigError(refusal)
            return sentence

        with memory.lock:
            wanted = {**settle(form.settings(values), memory.known.held), **preset}
            memory.known = replace(memory.known, held=held_of(wanted))
            said = _said(view, choose)
        filled = {plain[field]: wanted[field] for field in (*preset, "own_sampling")}
        return {**filled, form.memory: memory, **said}

    def handle_filled(view: View, memory: FormMemory[Shown] | None, *values: Any) -> Updates:
        """What the form shows holds: an edit on its way may have overtaken the choice, or the other way
        round."""
        if memory is None:
            return {row.said: gr.skip()}
        with memory.lock:
            wanted = settle(form.settings(values), memory.known.held)
            memory.known = replace(memory.known, held=held_of(wanted))
            if not edited(wanted, memory.known.kept):
                return {row.said: gr.skip()}
            try:
                memory.known = keep_sound(service, wanted, memory.known)[0]  # the form says what is refused
            except LocalMoeError as error:
                return {row.said: message_html(texts_for(view.language)(str(error)), False)}
        return {row.said: gr.skip()}

    def handle_save(view: View, name: str | None, *values: Any) -> Updates:
        """Of what the form shows: what was typed last may not be kept yet."""
        kept: list[str] = []

        def save() -> str:
            kept.append(service.presets.save(row.kind, name or "", check_answers(form.settings(values))))
            return "The preset is saved."

        said = _said(view, save)
        # the next name may be there already: it stays, unless this one was kept as another
        other = {"value": kept[0]} if kept and kept[0] != name else {}
        return {**said, **(preset_values(row, service, **other) if kept else {})}

    def handle_delete(view: View, name: str | None) -> Updates:
        done: list[bool] = []

        def delete() -> str:
            service.presets.delete(row.kind, name or "")
            done.append(True)
            return "The preset is deleted."

        said = _said(view, delete)
        return {**said, **(preset_values(row, service, value=None) if done else {})}

    def _said(view: View, act: Any) -> Updates:
        try:
            text, good = act(), True
        except LocalMoeError as error:
            text, good = str(error), False
        return {row.said: message_html(texts_for(view.language)(text), good)}

    chosen = f"(view, name, ...form) => [view, window.localmoeChosen('{row.kind}', name), ...form]"
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    row.name.input(
        handle_choose, [screen.view, row.name, form.memory, *form.fields()],
        [row.said, form.memory, *plain.values()], js=chosen, trigger_mode="always_last", **quiet,
    ).then(
        handle_filled, [screen.view, form.memory, *form.fields()], [row.said], trigger_mode="multiple",
        **quiet,
    )  # fmt: skip
    for event, handler, inputs in (
        (row.save.click, handle_save, form.fields()),
        (row.delete.click, handle_delete, []),
    ):
        event(
            handler, [screen.view, row.name, *inputs], [row.said, row.name], trigger_mode="multiple", **quiet
        )  # fmt: skip
