"""Labels, hints and fixed texts of the widgets in another language, found by looking at every widget of the
page. Translates nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import gradio as gr

from app.texts import Texts
from app.view import Updates

_PROPERTIES = ("label", "info", "placeholder")
_FIXED_VALUES = (gr.Button, gr.HTML)  # whose value is a text of the page, not the user's


def widget_texts(block: Any) -> Iterator[tuple[str, str]]:
    """(property, English text) of a widget's own texts."""
    for name in _PROPERTIES:
        text = getattr(block, name, None)
        if isinstance(text, str) and text.strip():
            yield name, text
    value = getattr(block, "value", None)
    if isinstance(block, _FIXED_VALUES) and isinstance(value, str) and value.strip():
        yield "value", value


def choice_texts(block: Any) -> list[tuple[str, Any]]:
    """The choices of a group of buttons, and of a list those that have a text. Those that are their own are
    names, which stay, as do all of a list in which one can type."""
    if isinstance(block, gr.Dropdown) and not block.allow_custom_value:
        return [(str(label), value) for label, value in block.choices if label != value]
    return [(str(label), value) for label, value in block.choices] if isinstance(block, gr.Radio) else []


def translatable(blocks: Iterable[Any], t: Texts) -> list[Any]:
    """The widgets that have a text which `t` knows."""
    return [block for block in blocks if translation(block, t)]


def translation(block: Any, t: Texts) -> dict[str, Any]:
    """The properties of a widget that change."""
    changed: dict[str, Any] = {name: t(text) for name, text in widget_texts(block) if t(text) != text}
    choices = choice_texts(block)
    if any(t(text) != text for text, _ in choices):
        changed["choices"] = [(t(text), value) for text, value in choices]
    return changed


def translations(widgets: Iterable[Any], t: Texts) -> Updates:
    """Updates that turn the page's English texts into those of `t`; nothing to do for English."""
    return {widget: gr.update(**translation(widget, t)) for widget in widgets}
