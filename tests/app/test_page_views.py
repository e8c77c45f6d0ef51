"""Which view of a page is the newest, and what a page may hold of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_what_a_page_holds_counts_only_where_nothing_newer_is_known() -> None:
    views, held = PageViews(), View(CHAT, page="a")
    newest = views.keep(View(None, notice="said", page="a"))
    assert newest.stamp > 0 and views.newest(held) == newest
    assert views.newest(View(CHAT, page="b", stamp=5)) == View(CHAT, page="b", stamp=0)


def test_each_action_leaves_a_newer_stamp() -> None:
    views, view = PageViews(), View(CHAT, page="a")
    stamps = [views.keep(views.newest(view)).stamp for _ in range(50)]
    assert stamps == sorted(set(stamps))


ACTIONS: dict[str, Callable[[View], View]] = {
    "stop": lambda view: view,
    "refused": lambda view: view.refused("not now"),
    "new": lambda view: view.at(None),
    "first": lambda view: view.at("1" * 32),
    "second": lambda view: view.at("2" * 32, 80),
    "words": lambda view: view.searching("words"),
    "others": lambda view: view.searching("others"),
}


@given(st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=6), st.data())
def test_of_actions_at_once_the_one_that_began_last_chooses_the_place(
    names: list[str], data: st.DataObject
) -> None:
    """However long each takes, the page is where it would be if one had waited for the other."""
    views = PageViews()
    views.keep(View(CHAT, page="a"))
    begun: list[tuple[str, View]] = []
    waiting, wanted = list(names), View(CHAT, page="a")
    while waiting or begun:
        if waiting and (not begun or data.draw(st.booleans())):
            name = waiting.pop(0)
            begun.append((name, views.newest(View(page="a"))))
            wanted = ACTIONS[name](replace(wanted, begun=wanted.begun + 1))
        else:
            name, view = begun.pop(data.draw(st.integers(0, len(begun) - 1)))
            left = views.keep(ACTIONS[name](view))
            assert views.newest(View(page="a")) == left
    assert (left.chat_id, left.shown, left.find) == (wanted.chat_id, wanted.shown, wanted.find)


def test_pages_that_were_left_long_ago_are_forgotten_and_before_gradio_does() -> None:
    views = PageViews()
    for i in range(PAGES + 40):
        views.keep(View(CHAT, page=f"left {i}", stamp=1))
        views.keep(View(CHAT, page="used", stamp=1 + i))
    assert len(views._views) == PAGES < SESSIONS
    assert views.newest(View(page="used")).stamp > 0
    assert views.newest(View(page="left 0")).stamp == 0
