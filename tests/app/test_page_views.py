"""Which view of a page is the newest, and what a page may hold of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.chat_search import MAX_QUERY
from app.page_views import PAGES, SESSIONS, PageViews, parse_view, view_text
from app.view import WINDOW, View

CHAT = "c" * 32


def test_a_page_holds_its_view() -> None:
    view = View(CHAT, 80, "no part of it", True, "zh", "words", "a page", 7)
    assert parse_view(view_text(view)) == replace(view, notice="", good=False, stamp=0)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "7", '{"chat": 3, "shown": null}', None, 7])
def test_what_no_page_of_ours_holds_is_a_new_page(text: object) -> None:
    assert parse_view(text) == View()


def test_each_part_of_what_a_page_holds_is_checked() -> None:
    wrong = {"chat": "../settings", "shown": -5, "language": "<b>", "find": "x" * 9999, "page": "y" * 9999}
    view = parse_view(json.dumps(wrong))
    assert (view.chat_id, view.shown, view.language) == (None, WINDOW, "en")
    assert len(view.find) == MAX_QUERY and len(view.page) == 32
    assert parse_view(json.dumps({"shown": 10**30})).shown < 10**7


def test_an_older_view_does_not_count() -> None:
    views, held = PageViews(), View(CHAT, page="a")
    newest = View(None, notice="said", page="a", stamp=2)
    for view in (newest, replace(held, stamp=1)):
        views.keep(view)
    assert views.newest(held) == newest
    assert views.newest(View(CHAT, page="b", stamp=5)) == View(CHAT, page="b", stamp=0)


def test_pages_that_were_left_long_ago_are_forgotten_and_before_gradio_does() -> None:
    views = PageViews()
    for i in range(PAGES + 40):
        views.keep(View(CHAT, page=f"left {i}", stamp=1))
        views.keep(View(CHAT, page="used", stamp=1 + i))
    assert len(views._views) == PAGES < SESSIONS
    assert views.newest(View(page="used")).stamp > 0
    assert views.newest(View(page="left 0")).stamp == 0
