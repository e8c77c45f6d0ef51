"""The settings that a load needs (model, budget, context, link), the better draft's switch, and Apply. Checks
nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.service import ChatService
from app.settings import LoadSettings
from app.status_html import message_html
from app.texts import texts_for
from app.view import Seen, Updates, View
from localmoe.core.errors import LocalMoeError

if TYPE_CHECKING:
    from app.screen import Screen


@dataclass(frozen=True, slots=True)
class LoadForm:
    """The widgets; `share` says what the budget buys, `applied` what came of Apply."""

    model: gr.Dropdown
    budget: gr.Textbox
    context: gr.Textbox
    link: gr.Textbox
    better_draft: gr.Checkbox
    apply: gr.Button
    applied: gr.HTML
    share: gr.HTML

    def fields(self) -> list[Any]:
        """Inputs of Apply."""
        return [self.model, self.budget, self.context, self.link, self.better_draft]


def create_load_form() -> LoadForm:
    """Lay the widgets out; their values come when a page opens."""
    with gr.Group(elem_classes=["lm-group"]):
        gr.HTML("<h2>Model and memory</h2>", apply_default_css=False)
        model = gr.Dropdown(
            [("demo", "demo")], value="demo", label="Model", allow_custom_value=True, elem_id="lm-model",
            info="A model on this computer, or a folder with its safetensors files.",
        )  # fmt: skip
        with gr.Row():
            budget = gr.Textbox(
                "auto", label="VRAM budget", elem_id="lm-budget",
                info="auto, or a size such as 12GiB: what the engine may use of the device memory.",
            )  # fmt: skip
            context = gr.Textbox(
                "auto", label="Context", elem_id="lm-context",
                info="auto, or the number of tokens that question and answer may have together.",
            )  # fmt: skip
        better_draft = gr.Checkbox(
            True, label="Build a better draft in the background", elem_id="lm-better-draft",
            info="Between answers, for minutes to hours, it calibrates a second draft, which takes disk "
            "space and, on a GPU, meanwhile part of the budget; then more drafted tokens are accepted, and "
            "answers stay the same.",
        )  # fmt: skip
        with gr.Accordion("Advanced", open=False):
            link = gr.Textbox(
                "", label="Emulated link", elem_id="lm-link", placeholder="off",
                info="Slows copies, e.g. to 2GB/s, to study a slower machine (CPU only). Empty: off.",
            )  # fmt: skip
        apply = gr.Button("Apply", variant="primary", elem_id="lm-apply")
        applied = gr.HTML("", apply_default_css=False, elem_id="lm-applied")
        share = gr.HTML("", apply_default_css=False, elem_id="lm-share")
    return LoadForm(model, budget, context, link, better_draft, apply, applied, share)


def load_values(form: LoadForm, service: ChatService) -> Updates:
    """What the form shows when a page opens."""
    load = service.load_settings
    try:
        models = list(service.list_models())
    except LocalMoeError:
        models = [("demo", "demo")]
    return {
        form.model: gr.Dropdown(choices=models, value=load.model),
        form.budget: load.vram_budget,
        form.context: load.context,
        form.link: load.emulated_link,
        form.better_draft: load.better_draft.strip().lower() == "on",
    }


def connect_load_form(form: LoadForm, screen: Screen) -> None:
    """Attach the listener."""

    def handle_apply(
        model: str, budget: str, context: str, link: str, better: bool, view: View, seen: Seen
    ) -> Updates:
        switch = "on" if better else "off"
        try:
            before = screen.service.load_settings
            draft = before.draft if model == before.model else ""  # a ready-made one is one model's
            wanted = LoadSettings(
                str(model or ""), budget or "auto", context or "auto", link or "", switch, draft
            )
            message, good = screen.service.apply_load(wanted), True
        except LocalMoeError as error:
            message, good = str(error), False
        return {
            **screen.updates(view, seen),
            form.applied: message_html(texts_for(view.language)(message), good),
        }

    inputs = [*form.fields(), screen.view, screen.seen]
    screen.listen(form.apply.click, handle_apply, inputs, [form.applied])
