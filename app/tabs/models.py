"""The Models tab: what fits, search, downloads, this computer's models, token. Asks the service; decides
nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.models.picture_settings import get_settings
from app.models.service import BACKGROUND, INSTANT, ModelsService
from app.models_view import token_html
from app.status_html import message_html
from app.texts import texts_for
from app.view import Seen, Updates, View, in_sight
from localmoe.core.errors import ConfigError, LocalMoeError

if TYPE_CHECKING:
    from app.models_screen import ModelsScreen
    from app.screen import Screen

_SCRIPT = Path(__file__).parent.parent / "static" / "actions.js"
_TO_CHAT = ("get-chat", "get-chat-disk", "chat", "chat-disk")  # buttons that lead there
_DRAFTS = [
    ("Instant, then a better one in the background", BACKGROUND), ("Instant only", INSTANT),
    ("Ready-made", "ready-made"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelsWidgets:
    """The widgets of the tab."""

    notice: gr.HTML
    queue: gr.HTML
    suggestions: gr.HTML
    query: gr.Textbox
    search: gr.Button
    draft: gr.Radio
    ready_made: gr.Textbox
    results: gr.HTML
    shelf: gr.HTML
    folder: gr.Textbox
    open_folder: gr.Button
    token_state: gr.HTML
    token: gr.Textbox
    keep_token: gr.Button

    def lists(self) -> list[gr.HTML]:
        """Those with buttons."""
        return [self.queue, self.suggestions, self.results, self.shelf, self.token_state]


def action_html(elem_id: str) -> gr.HTML:
    """A part of the page whose buttons become the event `act`."""
    return gr.HTML(
        "", apply_default_css=False, elem_id=elem_id, js_on_load=_SCRIPT.read_text(encoding="utf-8")
    )


def create_models_tab() -> ModelsWidgets:
    """Lay the widgets out."""
    with gr.Column(elem_id="lm-models"):
        notice = gr.HTML("", apply_default_css=False, elem_id="lm-models-notice")
        queue = action_html("lm-queue")
        suggestions = action_html("lm-suggestions")
        with gr.Row(elem_id="lm-search"):
            query = gr.Textbox(
                "", label="Search the Hugging Face Hub", elem_id="lm-query", max_lines=1, scale=1,
                placeholder="Words, owner/name, or the address of a model's page",
            )  # fmt: skip
            search = gr.Button("Search", variant="primary", elem_id="lm-search-button", scale=0, min_width=96)
        with gr.Accordion("The draft", open=False, elem_id="lm-draft-choice", elem_classes=["lm-fold"]):
            draft = gr.Radio(
                _DRAFTS, value=BACKGROUND, label="What drafts", elem_id="lm-draft-kind",
                info="A low-bit copy of the experts writes ahead, or, on a GPU, the layer that a model was "
                "trained with for it (MTP), if it has one. It changes the speed, never the answer.",
            )  # fmt: skip
            ready_made = gr.Textbox(
                "", label="Ready-made GPTQ checkpoint of the same model", elem_id="lm-ready-made",
                max_lines=1, visible="hidden", placeholder="owner/name of a GPTQ repo, or a folder",
            )  # fmt: skip
        results = action_html("lm-results")
        shelf = action_html("lm-shelf")
        with gr.Row(elem_id="lm-folder-row"):
            folder = gr.Textbox(
                "", label="A model folder elsewhere on this computer", elem_id="lm-folder", max_lines=1,
                scale=1, placeholder="/path/to/a/folder with config.json and safetensors files",
            )  # fmt: skip
            open_folder = gr.Button("Load the folder", elem_id="lm-open-folder", scale=0, min_width=120)
        with gr.Accordion("Access token", open=False, elem_id="lm-token-box", elem_classes=["lm-fold"]):
            token_state = action_html("lm-token-state")
            with gr.Row():
                token = gr.Textbox(
                    "", label="Token of the Hugging Face Hub", type="password", elem_id="lm-token",
                    max_lines=1, scale=1,
                    info="For gated and private models. It is kept in a file that only you can read.",
                )  # fmt: skip
                keep_token = gr.Button("Keep it", elem_id="lm-keep-token", scale=0, min_width=96)
    return ModelsWidgets(
        notice, queue, suggestions, query, search, draft, ready_made, results, shelf, folder, open_folder,
        token_state, token, keep_token,
    )  # fmt: skip


def connect_models_tab(
    screen: Screen, models_screen: ModelsScreen, others: Mapping[gr.HTML, gr.HTML]
) -> None:
    """Attach the listeners. others: parts elsewhere on the page with the same buttons, and where each says
    what comes of them."""
    models, widgets = models_screen.models, models_screen.widgets
    acts = _acts(models)
    done = _Done(screen, models_screen)

    def acting(place: gr.HTML) -> Callable[..., Updates]:
        """The listener of a part whose sentences are shown at this place."""

        def handle_act(
            draft: str, ready_made: str, view: View, seen: Seen, tab_seen: Seen, tab: str, event: gr.EventData
        ) -> Updates:
            data = event._data if isinstance(event._data, dict) else {}
            name, key = str(data.get("act", "")), str(data.get("key", ""))

            def act() -> str:
                if name not in acts:
                    raise ConfigError("This button is of an older page: load the page again.")
                return acts[name](key, _draft_choice(draft, ready_made))

            shown = view.at(None) if name in _TO_CHAT else view
            updates = done(view, shown, seen, (tab_seen, tab), act, place)
            return {**updates, **token_updates(widgets, view.language)}

        return handle_act

    def handle_search(query: str, view: View, seen: Seen, tab_seen: Seen, tab: str) -> Updates:
        return done(view, view, seen, (tab_seen, tab), lambda: models.search(query or ""))

    def handle_folder(
        folder: str, draft: str, ready_made: str, view: View, seen: Seen, tab_seen: Seen, tab: str
    ) -> Updates:
        def act() -> str:
            return models.open_folder(folder or "", _draft_choice(draft, ready_made))

        return done(view, view.at(None), seen, (tab_seen, tab), act)

    def handle_token(token: str, view: View, seen: Seen, tab_seen: Seen, tab: str) -> Updates:
        updates = done(view, view, seen, (tab_seen, tab), lambda: models.set_token(token or ""))
        return {**updates, widgets.token: "", **token_updates(widgets, view.language)}

    state = [screen.view, screen.seen, *models_screen.inputs()]
    outputs = models_screen.outputs()
    choice = [widgets.draft, widgets.ready_made]
    token_outputs = [*outputs, widgets.token, widgets.token_state]
    for part, place in {**dict.fromkeys(widgets.lists(), widgets.notice), **others}.items():
        screen.listen(part.act, acting(place), [*choice, *state], [*token_outputs, place])
    for event in (widgets.search.click, widgets.query.submit):
        screen.listen(event, handle_search, [widgets.query, *state], outputs, again="always_last")
    widgets.query.focus(
        models.client.prepare, None, None, queue=False, show_progress="hidden", api_visibility="private"
    )
    screen.listen(widgets.open_folder.click, handle_folder, [widgets.folder, *choice, *state], outputs)
    for event in (widgets.keep_token.click, widgets.token.submit):
        screen.listen(event, handle_token, [widgets.token, *state], token_outputs)
    widgets.draft.change(
        lambda kind: gr.Textbox(visible=in_sight(kind == "ready-made")),
        [widgets.draft], [widgets.ready_made], queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip


def token_updates(widgets: ModelsWidgets, language: str) -> Updates:
    """What the token's part says."""
    return {widgets.token_state: token_html(texts_for(language))}


@dataclass(frozen=True, slots=True)
class _Done:
    """Does what the user asked; the sentence that comes of it, or the refusal, is shown where that was, in
    the tab or at another place."""

    screen: Screen
    models_screen: ModelsScreen

    def __call__(
        self, view: View, new_view: View, seen: Seen, shown: tuple[Seen, str], act: Callable[[], str],
        place: gr.HTML | None = None,
    ) -> Updates:  # fmt: skip
        t = texts_for(view.language)
        try:
            message, good = act(), True
        except LocalMoeError as error:
            message, good, new_view = str(error), False, view
        return {
            **self.screen.updates(new_view, seen), **self.models_screen.refresh(new_view, *shown),
            place or self.models_screen.widgets.notice: message_html(t(message), good),
        }  # fmt: skip


def _draft_choice(kind: str, ready_made: str) -> str:
    if kind != "ready-made":
        return kind or BACKGROUND
    if not (ready_made or "").strip():
        raise ConfigError("Name the ready-made draft under The draft: a GPTQ repo or a folder.")
    return ready_made


def _acts(models: ModelsService) -> Mapping[str, Callable[[str, str], str]]:
    """What each button does with its key and the chosen draft; the sentence that comes of it."""

    def quiet(action: Callable[[str], Any]) -> Callable[[str, str], str]:
        def act(key: str, draft: str) -> str:
            action(key)
            return ""

        return act

    return {
        "get-chat": lambda key, draft: models.get(key, then_chat=True, draft=draft),
        "get-chat-disk": lambda key, draft: models.get(key, then_chat=True, draft=draft, from_disk=True),
        "get": lambda key, draft: models.get(key, then_chat=False, draft=draft),
        "chat": lambda key, draft: models.chat_with(key, models.draft_for(key, draft)),
        "chat-disk": lambda key, draft: models.chat_with(key, models.draft_for(key, draft), from_disk=True),
        "go-on": lambda key, draft: models.go_on(key),
        "get-settings": lambda key, draft: get_settings(models, key),
        "pause": quiet(models.queue.pause),
        "resume": quiet(models.queue.resume),
        "cancel": quiet(models.queue.cancel),
        "delete": lambda key, draft: models.delete(key),
        "delete-left": lambda key, draft: models.delete_left(key),
        "delete-records": lambda key, draft: models.delete_records(key),
        "search-again": quiet(models.finder.search),
        "look-again": quiet(models.finder.look_again),
        "forget-token": lambda key, draft: models.remove_token(),
        "stop-load": quiet(lambda key: models.stop_load()),
        "unload": quiet(lambda key: models.unload()),
        "use-budget": lambda key, draft: models.load_anew(budget_bytes=_number(key)),
        "use-context": lambda key, draft: models.load_anew(context=_number(key)),
        "use-disk": lambda key, draft: models.load_anew(from_disk=True),
    }


def _number(key: str) -> int:
    if not key.isdecimal() or len(key) > 18:
        raise ConfigError("This is no number.")
    return int(key)
