"""Puts the page together: columns, tabs, the timer, and what happens when a page opens. Decides no
behaviour."""

from __future__ import annotations

import gradio as gr

from app.screen import BUSY_S, Screen, Widgets
from app.service import ChatService
from app.tabs.chat import connect_chat_tab, create_chat_tab
from app.tabs.settings import connect_settings_tab, create_settings_tab, form_values
from app.tabs.sidebar import connect_sidebar, create_sidebar
from app.view import Seen, Updates, View

_TOP = """
<div class="lm-top">
 <button type="button" class="lm-only-narrow" data-toggle="nav"
  aria-label="Show or hide the chats">☰</button>
 <span class="lm-title">localmoe</span>
 <label class="lm-theme">Theme
  <select id="lm-theme"><option value="auto">auto</option><option value="light">light</option>
  <option value="dark">dark</option></select></label>
 <button type="button" class="lm-only-narrow" data-toggle="live"
  aria-label="Show or hide the live panel">Live</button>
</div>
"""


def build_page(service: ChatService) -> gr.Blocks:
    """The whole page on this service."""
    page = gr.Blocks(title="localmoe", fill_width=True, analytics_enabled=False)
    with page:
        with gr.Row(elem_id="lm-shell"):
            with gr.Column(elem_id="lm-nav", min_width=0):
                sidebar = create_sidebar()
            with gr.Column(elem_id="lm-main", min_width=0):
                gr.HTML(_TOP, apply_default_css=False)
                header = gr.HTML("", apply_default_css=False, elem_id="lm-header")
                news = gr.HTML("", apply_default_css=False, elem_id="lm-news")
                with gr.Tabs(elem_id="lm-tabs"):
                    with gr.Tab("Chat", id="chat", elem_id="lm-tab-chat"):
                        chat = create_chat_tab()
                    with gr.Tab("Settings", id="settings", elem_id="lm-tab-settings"):
                        settings = create_settings_tab()
            with gr.Column(elem_id="lm-live", min_width=0):
                panel = gr.HTML("", apply_default_css=False, elem_id="lm-live-panel")
        last_chat = gr.BrowserState(None, storage_key="localmoe-chat", secret="localmoe")
        timer = gr.Timer(BUSY_S)
        screen = Screen(service, Widgets(chat, sidebar, settings, header, news, panel, timer, last_chat))

        connect_chat_tab(chat, screen)
        connect_sidebar(sidebar, screen)
        connect_settings_tab(settings, screen)

        def handle_load(wanted: object) -> Updates:
            view = View(service.chat_to_open(wanted), notice=" ".join(service.reports()))
            return {**form_values(settings, service), **screen.updates(view, "")}

        def handle_tick(view: View, seen: Seen) -> Updates:
            return screen.refresh(view, seen)

        screen.listen(page.load, handle_load, [last_chat], settings.fields())
        screen.listen(timer.tick, handle_tick, [screen.view, screen.seen])
    return page
