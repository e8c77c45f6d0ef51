"""The frame of the live map, the link's bar and the step's drawing, in the page's language; its script
(static/live.js) fills it while it is in sight. Shows no number itself."""

from __future__ import annotations

from html import escape

from app import words
from app.cards import card, fact
from app.texts import ENGLISH, Texts


def live_cards_html(t: Texts = ENGLISH) -> str:
    """Three cards."""
    return f'<div class="lm-panel lm-live-cards">{_map(t)}{_link(t)}{_timeline(t)}</div>'


def _map(t: Texts) -> str:
    cell = escape(t("layer {layer}, expert {expert}: {place}, asked for in {share} of the recent passes"))
    hint = escape(
        t("a row a layer, a column an expert; the stronger the colour, the more passes asked for it lately")
    )
    empty = escape(t("Point at an expert to read of it."))
    keys = escape(t("The arrow keys read single experts."))
    texts = f'data-cell="{cell}" data-here="{escape(t("in a slot"))}" data-away="{escape(t("in RAM only"))}"'
    return card(
        t("Where the experts are"),
        f'<canvas class="lm-map" data-map tabindex="0" role="img" width="1" height="1" {texts} '
        f'aria-label="{escape(t("nothing loaded"))}" aria-describedby="lm-map-hint"></canvas>'
        f'<ul class="lm-legend lm-map-key">'
        f'<li><i class="hit"></i><span data-here>{escape(t("in a slot"))}</span></li>'
        f'<li><i class="late"></i><span data-away>{escape(t("in RAM only"))}</span></li></ul>'
        f'<p class="lm-map-cell" role="status" data-map-cell data-empty="{empty}"></p>'
        f'<p class="lm-hidden" id="lm-map-hint">{hint}. {keys}</p>',
        "map",
    )


def _link(t: Texts) -> str:
    hint = t("bytes a second copied in the last moments, beside what one copy alone was measured at")
    used = '<i class="hit" data-link-bar style="width:0"></i>'
    bar = f'<div class="lm-bar thin" aria-hidden="true">{used}</div>'
    return card(t("Link use"), fact(t("Now"), words.NONE, "link_now", hint) + bar, "link")


def _timeline(t: Texts) -> str:
    hint = escape(t("when drafts, passes of the 16-bit model, copies and waits ran in the last step"))
    export = escape(t("Save for Perfetto"))
    note = escape(t("all recorded steps, for ui.perfetto.dev or chrome://tracing"))
    return (
        f'<section class="lm-card" data-card="timeline"><details data-timeline><summary title="{hint}">'
        f"<h3>{escape(t('Step timeline'))}</h3></summary><div data-step></div>"
        f'<p class="lm-muted" data-step-words></p>'
        f'<a class="lm-act" href="/live/timeline.json" download="localmoe-timeline.json" title="{note}">'
        f"{export}</a></details></section>"
    )
