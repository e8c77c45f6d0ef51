"""The page's two languages: every text has both, with the same places to fill in."""

from __future__ import annotations

import ast
import asyncio
import builtins
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_process import ROOT
from fake_engine import FakeLoader

from app import bench_html, cache_card, models_html, panel, timeline_svg
from app.chinese import CHINESE
from app.models.service import ModelsService
from app.now import NowView
from app.page import build_page
from app.service import ChatService
from app.tabs import logs
from app.texts import ENGLISH, IN_CHINESE, texts_for
from app.translate import choice_texts, widget_texts
from localmoe.engine.suggestions import SUGGESTIONS

# names, numbers and what no user sees
UNTRANSLATED = (
    "Language code", "Shown", "Models shown", "Due", "Benchmark shown", "View", "Open tab",
    "Attached pictures",
)  # fmt: skip


def texts_in_code() -> Iterator[str]:
    """What is given to `t(...)` as it stands there."""
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "t"
            if named and node.args and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value


def sentences_of_refusals() -> Iterator[str]:
    """Whole ones that the page's own errors are made with; those with values in them stay English."""
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args
            if not named or not node.func.id.endswith("Error") or hasattr(builtins, node.func.id):
                continue
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value


def texts_in_tables() -> Iterator[str]:
    """What is given to `t(...)` from a table."""
    yield from models_html.WAYS_ON.values()
    yield from models_html._STATES.values()
    yield from panel._OWNER_NAMES.values()
    yield from panel._OWNER_HINTS.values()
    kinds = [*cache_card._KINDS.values(), *cache_card._KINDS_OF_DISK.values()]
    yield from (text for pair in kinds for text in pair)
    yield from timeline_svg.LANE_NAMES.values()
    yield from logs._LEVELS.values()
    yield from bench_html.COLUMN_NAMES
    yield from (suggestion.about for suggestion in SUGGESTIONS)


def texts_of_widgets(home: Path) -> Iterator[str]:
    service = ChatService(home, FakeLoader(), lambda: [])

    async def build() -> list[object]:
        return list(build_page(service, ModelsService(home, service, {}), NowView(service)).blocks.values())

    for block in asyncio.run(build()):
        if getattr(block, "elem_id", "") == "lm-top-line":
            continue  # drawn anew in the page's language
        yield from (text for _, text in widget_texts(block))
        yield from (text for text, _ in choice_texts(block))


def test_every_text_of_the_page_has_its_chinese(tmp_path: Path) -> None:
    used = {*texts_in_code(), *texts_in_tables(), *texts_of_widgets(tmp_path)}
    assert len(used) > 180  # the search finds them
    wordless = ("lm-brand", "data-part")
    missing = {text for text in used if text not in CHINESE and not any(name in text for name in wordless)}
    missing -= set(UNTRANSLATED)
    assert missing == set()


def test_every_whole_sentence_of_a_refusal_has_its_chinese() -> None:
    used = set(sentences_of_refusals())
    assert len(used) > 25  # the search finds them
    assert used - CHINESE.keys() == set()


def places(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_a_translation_has_the_same_places_to_fill_in_and_is_chinese() -> None:
    assert {text for text in CHINESE if places(text) != places(CHINESE[text])} == set()
    latin = {english for english, chinese in CHINESE.items() if all(ord(char) < 0x2E80 for char in chinese)}
    assert latin == {"PCIe", "Top-p", "Top-k", "Min-p", "localmoe", "huggingface_hub", "{done} of {total}"}


@pytest.mark.parametrize(
    ("chosen", "language"),
    [("zh-CN", "zh"), ("zh", "zh"), ("ZH-TW", "zh"), ("en-GB", "en"), ("de", "en"), ("", "en"), (None, "en")],
)
def test_any_chinese_is_chinese_and_all_else_english(chosen: object, language: str) -> None:
    assert texts_for(chosen).language == language


def test_values_are_filled_in_and_unknown_sentences_stay() -> None:
    assert ENGLISH("{done} of {total}", done=1, total="2 {x}") == "1 of 2 {x}"
    assert IN_CHINESE("hits {share}", share="87 %") == "命中 87 %"
    assert IN_CHINESE("The disk {is} odd.") == "The disk {is} odd."
