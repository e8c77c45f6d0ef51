"""The Benchmark tab: what to measure or predict, how far it is, and the results. Asks the service; decides
nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.bench.results import ResultError
from app.bench.service import MAX_PROMPTS, MAX_TOKENS, BenchmarkService
from app.bench_html import progress_html, result_html, result_name
from app.status_html import message_html
from app.texts import texts_for
from app.view import Seen, Updates, View, in_sight
from localmoe.core.errors import LocalMoeError
from localmoe.hardware.cards import CARDS
from localmoe.prefetch.registry import POLICIES

if TYPE_CHECKING:
    from app.screen import Screen

_LENGTHS = ["0", "2", "4", "8", "16", "auto"]
_BUSY_S = 1.0  # each look takes some 10 ms of the process that is measured


@dataclass(frozen=True, slots=True)
class BenchmarkWidgets:
    """The widgets of the tab. seen: as in `Screen`."""

    policies: gr.CheckboxGroup
    lengths: gr.CheckboxGroup
    prompts: gr.Slider
    tokens: gr.Slider
    cards: gr.CheckboxGroup
    budget: gr.Textbox
    run: gr.Button
    predict: gr.Button
    stop: gr.Button
    notice: gr.HTML
    progress: gr.HTML
    past: gr.Dropdown
    result: gr.HTML
    delete: gr.Button
    timer: gr.Timer
    seen: gr.Textbox

    def outputs(self) -> list[Any]:
        """What a refresh may change."""
        return [
            self.run, self.predict, self.stop, self.notice, self.progress, self.past, self.result,
            self.delete, self.timer, self.seen,
        ]  # fmt: skip


def create_benchmark_tab() -> BenchmarkWidgets:
    """Lay the widgets out."""
    with gr.Column(elem_id="lm-benchmark"):
        with gr.Group(elem_classes=["lm-group"]):
            gr.HTML(
                "<h2>This computer</h2><p>Measures the loaded model on prompts that come with localmoe, "
                "greedily, each setting from an empty cache.</p>",
                apply_default_css=False,
            )  # fmt: skip
            policies = gr.CheckboxGroup(
                list(POLICIES), value=["on-demand", "moe-speq"], label="Policies", elem_id="lm-bench-policies"
            )
            lengths = gr.CheckboxGroup(
                _LENGTHS, value=["0", "4", "auto"], label="Draft lengths", elem_id="lm-bench-lengths",
                info="0: nothing is drafted.",
            )  # fmt: skip
            with gr.Row():
                prompts = gr.Slider(1, MAX_PROMPTS, 4, step=1, label="Prompts", elem_id="lm-bench-prompts")
                tokens = gr.Slider(
                    2, MAX_TOKENS, 48, step=1, label="Tokens a prompt", elem_id="lm-bench-tokens"
                )
            run = gr.Button("Run the benchmark", variant="primary", elem_id="lm-bench-run")
        with gr.Group(elem_classes=["lm-group"]):
            gr.HTML(
                "<h2>What if?</h2><p>Records which experts the loaded model uses, and simulates it on other "
                "cards, with the policies and the fixed draft lengths chosen above. Predicted, not measured."
                "</p>",
                apply_default_css=False,
            )  # fmt: skip
            cards = gr.CheckboxGroup(
                [(_card_name(name), name) for name in CARDS], value=["rtx-4060", "rtx-4090"], label="Cards",
                elem_id="lm-bench-cards",
            )  # fmt: skip
            budget = gr.Textbox(
                "auto", label="Memory of the card that the model may use", elem_id="lm-bench-budget",
                info="auto: all of it, or a size such as 6GiB.",
            )  # fmt: skip
            predict = gr.Button("Predict", variant="primary", elem_id="lm-bench-predict")
        stop = gr.Button("Stop the benchmark", variant="stop", visible=False, elem_id="lm-bench-stop")
        notice = gr.HTML("", apply_default_css=False, elem_id="lm-bench-notice")
        progress = gr.HTML("", apply_default_css=False, elem_id="lm-bench-progress")
        with gr.Group(elem_classes=["lm-group"]):
            past = gr.Dropdown([], label="Results", elem_id="lm-bench-past", visible="hidden")
            result = gr.HTML("", apply_default_css=False, elem_id="lm-bench-result")
            delete = gr.Button("Delete this result", visible=False, elem_id="lm-bench-delete", size="sm")
    timer = gr.Timer(_BUSY_S, active=False)
    seen = gr.Textbox("", visible=False, label="Benchmark shown")
    return BenchmarkWidgets(
        policies, lengths, prompts, tokens, cards, budget, run, predict, stop, notice, progress, past, result,
        delete, timer, seen,
    )  # fmt: skip


def _card_name(name: str) -> str:
    return f"{CARDS[name].name.upper().replace('-', ' ')}, {CARDS[name].memory_bytes >> 30} GiB"


def refresh_benchmark(
    widgets: BenchmarkWidgets, service: BenchmarkService, view: View, seen: Seen, chosen: str | None
) -> Updates:
    """What changed since `seen`; a result that has just come is shown instead of the chosen one."""
    t, job, results = texts_for(view.language), service.view(), service.results
    kept = results.list()
    running = job is not None and job.phase == "running"
    told = _read(seen)
    newest = job.result if job is not None else ""
    ids = [result_id for result_id, _ in kept]
    shown = newest if newest in ids and told.get("newest") != newest else chosen
    if shown not in ids:
        shown = ids[0] if ids else None
    parts: dict[str, tuple[Any, Callable[[], Updates]]] = {
        "buttons": (
            running,
            lambda: {
                widgets.run: gr.Button(interactive=not running), widgets.stop: gr.Button(visible=running),
                widgets.predict: gr.Button(interactive=not running), widgets.timer: gr.Timer(active=running),
                widgets.notice: "",  # a refusal goes with its reason
            },
        ),
        "progress": (
            (None if job is None else job.revision, view.language),
            lambda: {widgets.progress: progress_html(job, t)},
        ),
        "past": (
            (results.revision, shown, view.language),
            lambda: {
                widgets.past: gr.Dropdown(
                    choices=[(result_name(one, t), result_id) for result_id, one in kept], value=shown,
                    visible=in_sight(bool(kept)),
                ),
                widgets.delete: gr.Button(visible=bool(kept)),
                widgets.result: "" if shown is None else result_html(results.get(shown), t),
            },
        ),
    }  # fmt: skip
    updates: Updates = {}
    for name, (key, make) in parts.items():
        if told.get(name) != repr(key):
            updates.update(make())
    keys = {name: repr(key) for name, (key, _) in parts.items()}
    return {**updates, widgets.seen: json.dumps({**keys, "newest": newest})}


def _read(seen: Seen) -> dict[str, str]:
    try:
        found = json.loads(seen or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def connect_benchmark_tab(
    widgets: BenchmarkWidgets, tab: gr.Tab, screen: Screen, service: BenchmarkService
) -> None:
    """Attach the listeners. tab: shows, when it is opened, what was done in another window."""

    def act(view: View, seen: Seen, chosen: str | None, action: Callable[[], None]) -> Updates:
        try:
            action()
            message = ""
        except LocalMoeError as error:
            message = str(error)
        return {
            **refresh_benchmark(widgets, service, view, seen, chosen),
            widgets.notice: message_html(texts_for(view.language)(message), False),
        }

    def handle_run(
        policies: list[str], lengths: list[str], prompts: float, tokens: float, view: View, seen: Seen,
        chosen: str | None,
    ) -> Updates:  # fmt: skip
        return act(view, seen, chosen, lambda: service.run(policies, lengths, prompts, tokens))

    def handle_predict(
        cards: list[str], policies: list[str], lengths: list[str], prompts: float, tokens: float, budget: str,
        view: View, seen: Seen, chosen: str | None,
    ) -> Updates:  # fmt: skip
        return act(
            view, seen, chosen,
            lambda: service.what_if(cards, policies, lengths, prompts, tokens, budget or "auto"),
        )  # fmt: skip

    def handle_stop(view: View, seen: Seen, chosen: str | None) -> Updates:
        return act(view, seen, chosen, service.stop)

    def handle_delete(view: View, seen: Seen, chosen: str | None) -> Updates:
        def delete() -> None:
            if not chosen:
                raise ResultError("This result is not there any more.")
            service.results.delete(chosen)

        return act(view, seen, chosen, delete)

    def handle_refresh(view: View, seen: Seen, chosen: str | None) -> Updates:
        return refresh_benchmark(widgets, service, view, seen, chosen)

    state = [screen.view, widgets.seen, widgets.past]
    run_inputs = [widgets.policies, widgets.lengths, widgets.prompts, widgets.tokens]
    for event, handler, inputs in (
        (widgets.run.click, handle_run, run_inputs),
        (widgets.predict.click, handle_predict, [widgets.cards, *run_inputs, widgets.budget]),
        (widgets.stop.click, handle_stop, []),
        (widgets.delete.click, handle_delete, []),
    ):
        _listen(event, handler, [*inputs, *state], widgets.outputs())
    _listen(widgets.timer.tick, handle_refresh, state, widgets.outputs())
    _listen(tab.select, handle_refresh, state, widgets.outputs(), trigger_mode="multiple")
    _listen(widgets.past.input, handle_refresh, state, widgets.outputs(), trigger_mode="always_last")


def _listen(
    event: Any, handler: Callable[..., Updates], inputs: list[Any], outputs: list[Any], **how: Any
) -> None:
    event(handler, inputs, outputs, queue=False, show_progress="hidden", api_visibility="private", **how)
