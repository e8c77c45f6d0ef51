"""The budget's slider and the words under the load settings: both follow every change of the form. Decides no
budget (the planner does)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.load_preview import budgets_for, is_known, preview_html
from app.models.service import ModelsService
from app.settings import parse_budget
from app.tabs.answer_form import user_edits
from app.tabs.load_form import LoadForm, chosen_settings, model_choices
from app.tabs.newest_edit import NewestEdit
from app.texts import texts_for
from app.view import Updates, View
from localmoe.core.errors import LocalMoeError
from localmoe.core.model_facts import BudgetRange
from localmoe.core.units import typed_size

if TYPE_CHECKING:
    from app.screen import Screen

_MIB = 1 << 20
_ASK_AGAIN_S, _ASK_BUSY_S = 0.7, 4.0  # the machine is not measured while an answer is written


def connect_load_preview(form: LoadForm, tab: gr.Tab, screen: Screen, models: ModelsService) -> None:
    """Attach the listeners."""

    timer = gr.Timer(_ASK_AGAIN_S, active=False)  # runs while something is still being looked at
    newest = NewestEdit()

    def told(view: View, choices: tuple[Any, ...]) -> Updates:
        wanted = chosen_settings(screen.service.load_settings, *choices)
        pace_s = _ASK_BUSY_S if screen.service.runner.busy() else _ASK_AGAIN_S
        return {
            form.preview: preview_html(models, wanted, texts_for(view.language)),
            timer: gr.Timer(pace_s, active=not is_known(models, wanted)),
        }

    def handle_edit(view: View, *choices: Any) -> Updates:
        """The form was changed elsewhere than at the slider, which follows."""
        return {**told(view, choices), **_follow(form, models, choices)}

    def handle_tick(view: View, *choices: Any) -> Updates:
        """Something may be known by now. It may have been edited while this was under way, so the switch is
        left to what the edit says of it: no tick comes later to put it right."""
        updates = handle_edit(view, *choices)
        updates.pop(form.automatic, None)
        return updates

    def handle_select(view: View, *choices: Any) -> Updates:
        models.shelf.refresh(closely=True)
        listed = gr.Dropdown(choices=model_choices(models.chats))  # some may have been got since
        return {**handle_edit(view, *choices), form.model: listed}

    def handle_slide(view: View, slid: float, *choices: Any) -> Updates:
        size = f"{round(slid)}MiB"
        changed = (choices[0], size, *choices[2:])
        return {**told(view, changed), form.budget: size, form.automatic: False}

    def handle_automatic(view: View, automatic: bool, slid: float, *choices: Any) -> Updates:
        """A budget of one's own begins where the slider stands; one that has not been given its ends yet
        stands at 0, and counts as at its upper end. Where they are not known, the budget stays automatic."""
        wanted = chosen_settings(screen.service.load_settings, *choices)
        budgets = None if automatic else budgets_for(models, wanted)
        size = "auto" if budgets is None else f"{_within(budgets, round(slid) or _ends(budgets)[1])}MiB"
        changed = (choices[0], size, *choices[2:])
        return {**told(view, changed), **_follow(form, models, changed), form.budget: size}

    def handle_act(event: gr.EventData) -> Updates:
        """The button of a budget that works, which the Models tab applies: the form says it too."""
        data = event._data if isinstance(event._data, dict) else {}
        key = str(data.get("key", ""))
        return {form.budget: typed_size(int(key)) if key.isdecimal() and len(key) < 19 else gr.skip()}

    def answering(handler: Callable[..., Updates], *, edits: bool = True) -> Callable[..., Updates]:
        """The handler, whose answer is left out where something was edited meanwhile. edits: it is told of an
        edit itself."""

        def handle(request: gr.Request, *inputs: Any) -> Updates:
            page = str(request.session_hash)
            number = newest.begin(page) if edits else newest.number(page)
            updates = handler(*inputs)
            return updates if newest.number(page) == number else {form.preview: gr.skip()}

        return handle

    choices = form.choices()
    parts = [form.preview, form.slider, form.automatic, timer]
    edits = [event for widget in choices for event in user_edits(widget)]
    _listen(edits, answering(handle_edit), [screen.view, *choices], parts)
    looks = answering(handle_select, edits=False), answering(handle_edit, edits=False)
    _listen([tab.select], looks[0], [screen.view, *choices], [*parts, form.model])
    _listen([form.share.change, form.refilled.change], looks[1], [screen.view, *choices], parts)
    known = [form.preview, form.slider, timer]
    _listen([timer.tick], answering(handle_tick, edits=False), [screen.view, *choices], known)
    form.preview.act(
        handle_act, [], [form.budget], queue=False, show_progress="hidden", api_visibility="private",
        trigger_mode="multiple",
    )  # fmt: skip
    slid = [form.preview, form.budget, form.automatic, timer]
    _listen([form.slider.input], answering(handle_slide), [screen.view, form.slider, *choices], slid)
    inputs = [screen.view, form.automatic, form.slider, *choices]
    _listen(
        [form.automatic.input],
        answering(handle_automatic),
        inputs,
        [*parts, form.budget],
    )


def _follow(form: LoadForm, models: ModelsService, choices: tuple[Any, ...]) -> Updates:
    """The slider at the form's budget, within what the planner says is possible."""
    wanted = chosen_settings(models.chats.load_settings, *choices)
    try:
        budget = parse_budget(wanted.vram_budget)
    except LocalMoeError:
        return {}  # half typed
    budgets = budgets_for(models, wanted)
    if budgets is None:
        return {form.slider: gr.Slider(interactive=False), form.automatic: budget is None}
    low, high = _ends(budgets)
    value = _within(budgets, (budgets.most_bytes if budget is None else budget) // _MIB)
    return {
        form.slider: gr.Slider(minimum=low, maximum=high, value=value, interactive=True),
        form.automatic: budget is None,
    }


def _ends(budgets: BudgetRange) -> tuple[int, int]:
    """The slider's ends, in MiB."""
    low = -(-budgets.least_bytes // _MIB)
    return low, max(budgets.most_bytes // _MIB, low + 1)


def _within(budgets: BudgetRange, size: int) -> int:
    """The size nearest to this one that the slider has, in MiB."""
    low, high = _ends(budgets)
    return min(high, max(low, size))


def _listen(events: list[Any], handler: Any, inputs: list[Any], outputs: list[Any]) -> None:
    gr.on(
        events, handler, inputs, outputs, queue=False, show_progress="hidden", api_visibility="private",
        trigger_mode="always_last",
    )  # fmt: skip
