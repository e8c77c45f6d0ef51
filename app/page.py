"""Puts the page together: columns, tabs, and what happens when a page opens. Decides no
behaviour."""

from __future__ import annotations

from html import escape

import gradio as gr

from app.bench.service import BenchmarkService
from app.chat_search import MAX_QUERY
from app.live_html import live_cards_html
from app.models.service import ModelsService
from app.models_screen import STILL_S, ModelsScreen
from app.now import NowView
from app.now_html import frame_html
from app.page_views import SESSIONS
from app.pictures import MAX_PICTURES
from app.screen import Screen, Widgets
from app.service import ChatService
from app.tabs.benchmark import connect_benchmark_tab, create_benchmark_tab, refresh_benchmark
from app.tabs.chat import connect_chat_tab, create_chat_tab
from app.tabs.load_preview import connect_load_preview
from app.tabs.logs import logs_html
from app.tabs.models import action_html, connect_models_tab, create_models_tab, token_updates
from app.tabs.settings import connect_settings_tab, create_settings_tab, form_values
from app.tabs.sidebar import connect_sidebar, create_sidebar
from app.texts import IN_CHINESE, Texts, texts_for
from app.theme import STATIC
from app.translate import translatable, translations
from app.view import Seen, Updates, View

TABS = ("chat", "models", "settings", "benchmark", "logs")
_LANGUAGE = "window.localmoeLanguage()"
_LOST = (
    "localmoe does not answer, as if it had been closed: start it again with python launch.py. This page "
    "then goes on by itself, with what you have written."
)


def top_html(t: Texts) -> str:
    """The line above the tabs: title, language, theme, the live panel, and the chats of narrow screens."""

    def choice(name: str, label: str, options: tuple[tuple[str, str], ...]) -> str:
        items = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options)
        name_of = f'title="{escape(label)}"><span>{escape(label)}</span>'
        return f'<label class="lm-theme" {name_of}<select id="lm-{name}">{items}</select></label>'

    languages = (("auto", t("auto")), ("en", "English"), ("zh", "中文"))
    themes = (("auto", t("auto")), ("light", t("light")), ("dark", t("dark")))
    chats, live = escape(t("Show or hide the chats")), escape(t("Show or hide the live panel"))
    return (
        '<div class="lm-top"><button type="button" class="lm-only-narrow" data-toggle="nav" '
        f'aria-controls="lm-nav" aria-label="{chats}">☰</button><span class="lm-title">localmoe</span>'
        f"{choice('language', t('Language'), languages)}{choice('theme', t('Theme'), themes)}"
        f'<button type="button" data-toggle="live" aria-controls="lm-live" aria-label="{live}">'
        f"{escape(t('Live'))}</button>{_attach_texts(t)}"
        f'<i id="lm-lost-text" hidden>{escape(t(_LOST))}</i></div>'
    )


def _attach_texts(t: Texts) -> str:
    """What static/attach.js says of files."""
    said = {
        "reading": t("Reading {name}"),
        "left": t("{name} was left out, as the chat has changed meanwhile: attach it again."),
        "none": t("{name} is no text file in UTF-8: copy what it says instead."),
        "large": t("{name} is too long for a message: attach a part of it."),
        "unread": t("{name} cannot be read: choose files, not folders."),
        "kind": t("{name} is no picture that can be read: use PNG, JPEG, WebP, GIF or BMP."),
        "many": t(
            "{name} was left out: a message takes {count} pictures.", name="{name}", count=MAX_PICTURES
        ),
        "unsent": t("{name} could not be attached: is localmoe still running?"),
        "remove": t("Remove {name}"),
        "pictures": t("Pictures of this message"),
    }
    told = "".join(f' data-{why}="{escape(text)}"' for why, text in said.items())
    return f'<i id="lm-attach-texts" hidden{told}></i>'


def build_page(service: ChatService, models: ModelsService, now: NowView) -> gr.Blocks:
    """The whole page on these services."""
    benchmarks = BenchmarkService(service)
    page = gr.Blocks(title="localmoe", fill_width=True, analytics_enabled=False)
    page.state_session_capacity = SESSIONS
    with page:
        with gr.Row(elem_id="lm-shell"):
            with gr.Column(elem_id="lm-nav", min_width=0):
                sidebar = create_sidebar()
            with gr.Column(elem_id="lm-main", min_width=0):
                top = gr.HTML(top_html(Texts()), apply_default_css=False, elem_id="lm-top-line")
                header = action_html("lm-header")
                said = gr.HTML("", apply_default_css=False, elem_id="lm-said")
                news = gr.HTML("", apply_default_css=False, elem_id="lm-news")
                with gr.Tabs(elem_id="lm-tabs", selected="chat") as tabs:
                    with gr.Tab("Chat", id="chat", elem_id="lm-tab-chat") as chat_tab:
                        chat = create_chat_tab()
                    with gr.Tab("Models", id="models", elem_id="lm-tab-models") as models_tab:
                        models_widgets = create_models_tab()
                    with gr.Tab("Settings", id="settings", elem_id="lm-tab-settings") as settings_tab:
                        settings = create_settings_tab()
                    with gr.Tab("Benchmark", id="benchmark", elem_id="lm-tab-benchmark") as benchmark_tab:
                        benchmark = create_benchmark_tab()
                    with gr.Tab("Logs", id="logs", elem_id="lm-tab-logs") as logs_tab:
                        logs = gr.HTML("", apply_default_css=False, elem_id="lm-logs")
            with gr.Column(elem_id="lm-live", min_width=0):
                gr.HTML(frame_html("panel"), apply_default_css=False, elem_id="lm-live-panel")
                live_cards = gr.HTML("", apply_default_css=False, elem_id="lm-live-cards")
        last_chat = gr.BrowserState(None, storage_key="localmoe-chat", secret="localmoe")
        language = gr.Textbox("", visible=False, label="Language code")
        mark = gr.HTML(
            "", apply_default_css=False, elem_id="lm-mark",
            js_on_load=(STATIC / "now.js").read_text(encoding="utf-8"),
        )  # fmt: skip
        kept = gr.HTML("", apply_default_css=False, visible="hidden")  # outside of tabs, which come late
        widgets = Widgets(chat, sidebar, settings, header, said, news, kept, mark, last_chat)
        screen = Screen(service, now, widgets)
        models_timer = gr.Timer(STILL_S, active=False)
        models_seen = gr.Textbox("", visible=False, label="Models shown")
        open_tab = gr.Textbox("chat", visible=False, label="Open tab")  # in the page, as its view
        models_screen = ModelsScreen(
            models, models_widgets, chat.welcome, tabs, models_timer, models_seen, open_tab
        )

        connect_chat_tab(chat, screen)
        connect_sidebar(sidebar, screen)
        connect_settings_tab(settings, screen)
        connect_load_preview(settings.load, settings_tab, screen, models)
        places = {header: said, chat.welcome: said, settings.load.preview: settings.load.applied}
        connect_models_tab(screen, models_screen, places)
        connect_benchmark_tab(benchmark, benchmark_tab, screen, benchmarks)
        shown = (chat_tab, models_tab, settings_tab, benchmark_tab, logs_tab)
        for tab, name in zip(shown, TABS, strict=True):
            _connect_tab(tab, name, screen, models_screen)

        def handle_load(wanted: object, chosen: object, shown_tab: str, find: str | None) -> Updates:
            code = texts_for(chosen).language
            notice = " ".join([*service.reports(), *models.reports(), *benchmarks.results.reports])
            searched = (find or "")[:MAX_QUERY]  # where the page is open already, and was forgotten here
            view = View(service.chat_to_open(wanted), notice=notice, language=code, find=searched)
            models.shelf.refresh()
            t = texts_for(code)
            return {
                live_cards: live_cards_html(t), logs: logs_html(service.logs.path, t),
                **screen.updates(view, ""), **form_values(settings, service), kept: gr.skip(),
                **models_screen.refresh(view, "", shown_tab),
                **token_updates(models_widgets, code), top: top_html(t),
                **refresh_benchmark(benchmark, benchmarks, view, "", None),
            }  # fmt: skip

        extra = [*settings.fields(), *models_screen.outputs(), models_widgets.token_state, top]
        extra += [live_cards, logs, *benchmark.outputs()]
        for opened in (page.load, mark.open):
            screen.listen(
                opened, handle_load, [last_chat, language, open_tab, sidebar.find], extra,
                js=f"(chat, language, tab, find) => [chat, {_LANGUAGE}, tab, find]", again="once",
            )  # fmt: skip
        screen.listen_to_script()
        models_timer.tick(
            models_screen.refresh, [screen.view, *models_screen.inputs()], models_screen.outputs(),
            queue=False, show_progress="hidden", api_visibility="private",
        )  # fmt: skip
        _connect_language(page, language)
    return page


def _connect_tab(tab: gr.Tab, name: str, screen: Screen, models_screen: ModelsScreen) -> None:
    def handle_select(view: View, seen: Seen) -> Updates:
        if name == "models":
            models_screen.models.shelf.refresh(closely=True)
        shown = models_screen.refresh(view, seen, name, leads=False)  # who opens a tab stays there
        return {**shown, models_screen.tab: name}

    tab.select(
        handle_select, [screen.view, models_screen.seen], [*models_screen.outputs(), models_screen.tab],
        queue=False, show_progress="hidden", api_visibility="private", trigger_mode="multiple",
    )  # fmt: skip


def _connect_language(page: gr.Blocks, language: gr.Textbox) -> None:
    """Labels and hints of the widgets, once a page opens; what moves is drawn in its language anyway."""
    widgets = translatable(page.blocks.values(), IN_CHINESE)

    def handle_language(chosen: object) -> Updates:
        t = texts_for(chosen)
        return translations(widgets, t) if t is IN_CHINESE else {widget: gr.skip() for widget in widgets}

    page.load(
        handle_language, [language], widgets, js=f"() => [{_LANGUAGE}]", queue=False, show_progress="hidden",
        api_visibility="private",
    )  # fmt: skip
