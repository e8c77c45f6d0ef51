"""Colours, fonts, and the page's own style sheet and script. Uses the system's fonts: nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

STATIC = Path(__file__).parent / "static"
_SHEETS = ("page.css", "fit.css", "attach.css", "live.css")
_SCRIPTS = (
    "presses.js", "page.js", "asking.js", "keys.js", "follow.js", "thoughts.js", "copying.js", "held.js",
    "attach.js", "presets.js", "focus.js", "live.js", "logs.js", "picture.js", "unsent.js",
)  # fmt: skip
FAVICON = STATIC / "favicon.svg"
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif")
_MONO = ("ui-monospace", "SF Mono", "Cascadia Mono", "DejaVu Sans Mono", "monospace")


def make_theme() -> gr.themes.Base:
    """A quiet theme: slate surfaces, one green accent."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.emerald,
        secondary_hue=gr.themes.colors.emerald,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_lg,
        font=_SANS,
        font_mono=_MONO,
    ).set(
        body_background_fill="#f5f7fa", body_background_fill_dark="#0d1219",
        body_text_color="#18212f", body_text_color_dark="#e6ebf2",
        background_fill_primary="#ffffff", background_fill_primary_dark="#141b25",
        background_fill_secondary="#eef1f6", background_fill_secondary_dark="#1d2632",
        border_color_primary="#e1e6ee", border_color_primary_dark="#283344",
        block_background_fill="#ffffff", block_background_fill_dark="#141b25",
        block_label_text_color="#18212f", block_label_text_color_dark="#e6ebf2",
        block_title_text_color="#18212f", block_title_text_color_dark="#e6ebf2",
        block_title_text_weight="600",
        block_info_text_color="#5a6779", block_info_text_color_dark="#97a5b8",
        input_background_fill="#f5f7fa", input_background_fill_dark="#0d1219",
        input_border_color="#d5dce6", input_border_color_dark="#34425a", input_border_width="1px",
        button_primary_background_fill="#0a7d59", button_primary_background_fill_hover="#086a4b",
        button_primary_background_fill_dark="#0a7d59", button_primary_background_fill_hover_dark="#0c9269",
        button_primary_text_color="#ffffff", button_secondary_background_fill="#e8ecf2",
        button_secondary_background_fill_dark="#283344",
    )  # fmt: skip


def page_css() -> str:
    """The style sheet."""
    return "".join((STATIC / name).read_text(encoding="utf-8") for name in _SHEETS)


def page_head() -> str:
    """The scripts, for the head of the document."""
    return "".join(f"<script>{(STATIC / name).read_text(encoding='utf-8')}</script>" for name in _SCRIPTS)


def first_script() -> str:
    """The scripts that have to run before Gradio's."""
    return "".join((STATIC / name).read_text(encoding="utf-8") for name in ("frames.js", "clones.js"))
