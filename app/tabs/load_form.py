"""The settings that a load needs (model, budget, draft, lanes), the better draft's switch, and Apply. Checks
nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.service import ChatService
from app.settings import LoadSettings, parse_budget
from app.status_html import message_html
from app.tabs.form_memory import FormMemory
from app.tabs.models import action_html
from app.texts import texts_for
from app.view import Seen, Updates, View
from localmoe.core.config import ALLOWED_DRAFT_BITS, LANES
from localmoe.core.errors import LocalMoeError

if TYPE_CHECKING:
    from app.screen import Screen

_EXPERTS_ON = [("in RAM", "ram"), ("on the disk", "disk")]
_DRAFTERS = [
    ("automatic", "auto"), ("the model itself, in low bits", "self"),
    ("its MTP layer, where it has one", "mtp"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadForm:
    """The widgets; `share` says what the budget buys, `applied` what came of Apply. memory: of the settings
    that the form was last filled in from; refilled: changes when it was filled in after the page opened."""

    model: gr.Dropdown
    automatic: gr.Checkbox
    slider: gr.Slider
    budget: gr.Textbox
    context: gr.Textbox
    experts_on: gr.Radio
    ram_budget: gr.Textbox
    drafter: gr.Radio
    draft_bits: gr.Radio
    better_draft: gr.Checkbox
    lanes: gr.Radio
    threads: gr.Textbox
    link: gr.Textbox
    preview: gr.HTML
    apply: gr.Button
    applied: gr.HTML
    share: gr.HTML
    memory: gr.State
    refilled: gr.HTML

    def fields(self) -> list[Any]:
        """What is filled in when a page opens."""
        return [*self.choices(), self.automatic, self.memory]

    def choices(self) -> list[Any]:
        """Inputs of Apply, in the order of `chosen_settings`."""
        return [
            self.model, self.budget, self.context, self.link, self.better_draft, self.draft_bits, self.lanes,
            self.threads, self.drafter, self.experts_on, self.ram_budget,
        ]  # fmt: skip

    def named(self) -> dict[str, Any]:
        """Widgets by the name of their setting."""
        return {
            "model": self.model, "vram_budget": self.budget, "context": self.context,
            "emulated_link": self.link, "better_draft": self.better_draft, "draft_bits": self.draft_bits,
            "lanes": self.lanes, "cpu_threads": self.threads, "drafter": self.drafter,
            "experts_on": self.experts_on, "ram_budget": self.ram_budget,
        }  # fmt: skip


def create_load_form() -> LoadForm:
    """Lay the widgets out; their values come when a page opens."""
    with gr.Group(elem_classes=["lm-group"]):
        gr.HTML("<h2>Model and memory</h2>", apply_default_css=False)
        model = gr.Dropdown(
            [("demo", "demo")], value="demo", label="Model", allow_custom_value=True, elem_id="lm-model",
            info="A model on this computer, or a folder with its safetensors files.",
        )  # fmt: skip
        automatic = gr.Checkbox(
            True, label="Choose the VRAM budget automatically", elem_id="lm-automatic",
            info="All that is free but a reserve, and no more than the model can use.",
        )  # fmt: skip
        slider = gr.Slider(
            0, 1, 0, step=1, label="VRAM budget in MiB", elem_id="lm-budget-slider", interactive=False,
            buttons=[],
        )  # fmt: skip
        with gr.Row():
            budget = gr.Textbox(
                "auto", label="VRAM budget as a size", elem_id="lm-budget",
                info="auto, or a size such as 12GiB: what the engine may use of the device memory.",
            )  # fmt: skip
            context = gr.Textbox(
                "auto", label="Context", elem_id="lm-context",
                info="auto, or the number of tokens that question and answer may have together; auto takes "
                "4,096, or more where they need little memory.",
            )  # fmt: skip
        with gr.Row():
            experts_on = gr.Radio(
                _EXPERTS_ON, value="ram", label="Experts lie", elem_id="lm-experts-on",
                info="On the disk for models that RAM does not hold: the first load writes them into a file "
                "beside the model's drafts, RAM holds as many as there is room for, and the others are read "
                "when they are asked for. Slower.",
            )  # fmt: skip
            ram_budget = gr.Textbox(
                "auto", label="RAM for experts on the disk", elem_id="lm-ram-budget",
                info="auto, or a size such as 12GiB: what those that lie on the disk may take of RAM; auto "
                "takes all that is free but a reserve.",
            )  # fmt: skip
        drafter = gr.Radio(
            _DRAFTERS, value="auto", label="Drafted by", elem_id="lm-drafter",
            info="An MTP layer, which some models are published with (Qwen3.5, GLM 4.7, ...), takes some 0.5 "
            "GiB, a small part of what a draft in low bits takes. Automatic: that layer on a GPU, if the "
            "model has one, else the model itself.",
        )  # fmt: skip
        draft_bits = gr.Radio(
            [(f"{bits} bits", f"{bits}") for bits in ALLOWED_DRAFT_BITS], value="4",
            label="Bits of the draft", elem_id="lm-draft-bits",
            info="Fewer bits leave more VRAM to experts, and fewer drafted tokens are accepted. On a CPU, 2 "
            "and 3 bits take as much memory as 4.",
        )  # fmt: skip
        better_draft = gr.Checkbox(
            True, label="Build a better draft in the background", elem_id="lm-better-draft",
            info="Between answers, for minutes to hours, it calibrates a second draft, which takes disk "
            "space and, on a GPU, meanwhile part of the budget; then more drafted tokens are accepted, and "
            "answers stay the same.",
        )  # fmt: skip
        with gr.Accordion("Advanced", open=False):
            lanes = gr.Radio(
                list(LANES), value="auto", label="Where experts outside VRAM come from", elem_id="lm-lanes",
                info="link: over PCIe. cpu: computed on the CPU. auto: what was measured to pay.",
            )  # fmt: skip
            threads = gr.Textbox(
                "auto", label="CPU threads", elem_id="lm-threads",
                info="auto, or how many threads compute experts on the CPU.",
            )  # fmt: skip
            link = gr.Textbox(
                "", label="Emulated link", elem_id="lm-link", placeholder="off",
                info="Slows copies, e.g. to 2GB/s, to study a slower machine (CPU only). Empty: off.",
            )  # fmt: skip
        preview = action_html("lm-preview")
        apply = gr.Button("Apply", variant="primary", elem_id="lm-apply")
        applied = gr.HTML("", apply_default_css=False, elem_id="lm-applied")
        share = gr.HTML("", apply_default_css=False, elem_id="lm-share")
        refilled = gr.HTML("", apply_default_css=False, visible="hidden")
    return LoadForm(
        model, automatic, slider, budget, context, experts_on, ram_budget, drafter, draft_bits, better_draft,
        lanes, threads, link, preview, apply, applied, share, gr.State(None), refilled,
    )  # fmt: skip


def chosen_settings(
    before: LoadSettings, model: str, budget: str, context: str, link: str, better: bool, bits: str,
    lanes: str, threads: str, drafter: str, experts_on: str, ram_budget: str,
) -> LoadSettings:  # fmt: skip
    """What the form says; a ready-made draft, which is one model's, stays with its model, unless another one
    is to draft."""
    draft = before.draft if model == before.model and drafter != "mtp" else ""
    return LoadSettings(
        str(model or ""), budget or "auto", context or "auto", link or "", "on" if better else "off", draft,
        str(bits or "4"), str(lanes or "auto"), threads or "auto", str(drafter or "auto"),
        str(experts_on or "ram"), ram_budget or "auto",
    )  # fmt: skip


def edited_settings(now: LoadSettings, shown: LoadSettings, held: LoadSettings | None) -> LoadSettings:
    """The settings `now`, but for those that the user has changed in the form: it may show others that were
    changed elsewhere meanwhile.

    Args:
        shown: what the form says.
        held: what it was filled in from; None: it is not known, and all that the form says is meant.
    """
    if held is None:
        return shown
    names = changed_names(held, shown)
    wanted = replace(now, **{name: getattr(shown, name) for name in names})
    keeps_draft = wanted.model == now.model and wanted.drafter != "mtp"
    return wanted if keeps_draft else replace(wanted, draft="")


def changed_names(before: LoadSettings, after: LoadSettings) -> list[str]:
    """The settings that the form shows otherwise."""
    first, second = _shown(before), _shown(after)
    return [name for name in first if first[name] != second[name]]


def _shown(load: LoadSettings) -> dict[str, str | bool]:
    """What the widgets show, by the name of the setting."""
    return {
        "model": load.model, "vram_budget": load.vram_budget, "context": load.context,
        "emulated_link": load.emulated_link, "better_draft": load.better_draft.strip().lower() == "on",
        "draft_bits": load.draft_bits.strip(), "lanes": load.lanes.strip().lower(),
        "cpu_threads": load.cpu_threads, "drafter": load.drafter.strip().lower(),
        "experts_on": load.experts_on.strip().lower(), "ram_budget": load.ram_budget,
    }  # fmt: skip


def model_choices(service: ChatService) -> list[tuple[str, str]]:
    """The models of this computer, as far as they can be listed."""
    try:
        return list(service.list_models())
    except LocalMoeError:
        return [("demo", "demo")]


def load_values(form: LoadForm, service: ChatService) -> Updates:
    """What the form shows when a page opens."""
    load = service.load_settings
    return {**_filled(form, service, load, list(_shown(load))), form.memory: FormMemory(load)}


def followed_load(
    form: LoadForm, service: ChatService, memory: FormMemory[LoadSettings] | None, choices: Sequence[Any]
) -> Updates:
    """What the form shows otherwise once settings were changed elsewhere; what its user is changing stays."""
    if memory is None:  # the connection was lost for long: what is typed is not told from what is out of date
        return load_values(form, service)
    with memory.lock:
        load, held = service.load_settings, memory.known
        own = changed_names(held, chosen_settings(load, *choices))
        names = [name for name in changed_names(held, load) if name not in own]
        memory.known = load
    return {**_filled(form, service, load, names), form.memory: gr.skip()}


def _filled(form: LoadForm, service: ChatService, load: LoadSettings, names: Sequence[str]) -> Updates:
    """The widgets of these settings."""
    shown, widgets = _shown(load), form.named()
    updates: Updates = {widgets[name]: shown[name] for name in names}
    if "model" in names:
        updates[form.model] = gr.Dropdown(choices=model_choices(service), value=load.model)
    if "vram_budget" in names:
        updates[form.automatic] = parse_budget(load.vram_budget) is None
    return updates


def connect_load_form(form: LoadForm, screen: Screen) -> None:
    """Attach the listener."""
    service = screen.service

    def apply(wanted: LoadSettings) -> tuple[str, bool]:
        try:
            return service.apply_load(wanted), True
        except LocalMoeError as error:
            return str(error), False

    def handle_apply(
        view: View, seen: Seen, memory: FormMemory[LoadSettings] | None, *choices: Any
    ) -> Updates:
        shown = chosen_settings(service.load_settings, *choices)
        if memory is None:
            message, good = apply(edited_settings(service.load_settings, shown, None))
        else:
            with memory.lock:
                held = memory.known
                message, good = apply(edited_settings(service.load_settings, shown, held))
                if good:  # what was changed elsewhere is still to be filled in
                    own = {name: getattr(shown, name) for name in changed_names(held, shown)}
                    memory.known = replace(held, **own)
        return {
            **screen.updates(view, seen),
            form.applied: message_html(texts_for(view.language)(message), good),
        }

    inputs = [screen.view, screen.seen, form.memory, *form.choices()]
    screen.listen(form.apply.click, handle_apply, inputs, [form.applied], again="always_last")
