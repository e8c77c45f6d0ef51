"""The parts that the live panel is made of: cards, facts, bars, legends. Knows no number's meaning; all texts
are escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def card(title: str, body: str, name: str) -> str:
    """A titled part of the panel."""
    return f'<section class="lm-card" data-card="{name}"><h3>{escape(title)}</h3>{body}</section>'


def fact(label: str, value: str, key: str, hint: str) -> str:
    """One measured number. hint: what it means, shown on hover; as the title of a named group it is also the
    group's accessible description."""
    named = f'role="group" aria-label="{escape(label)}" title="{escape(hint)}"'
    return (
        f'<div class="lm-fact" {named}><span>{escape(label)}</span>'
        f'<b data-key="{key}">{escape(value)}</b></div>'
    )


def bar(parts: Sequence[tuple[str, float]], label: str) -> str:
    """A bar of shares (class, share of the whole)."""
    spans = "".join(
        f'<i class="{name}" style="width:{100 * share:.2f}%"></i>' for name, share in parts if share > 0
    )
    return f'<div class="lm-bar" role="img" aria-label="{escape(label)}">{spans}</div>'


def legend(parts: Sequence[tuple[str, str, str, str]]) -> str:
    """(class, text, value, hint) of what a bar shows."""
    items = "".join(
        f'<li title="{escape(hint)}"><i class="{name}" aria-hidden="true"></i><span>{escape(text)}</span>'
        f"<b>{escape(value)}</b></li>"
        for name, text, value, hint in parts
    )
    return f'<ul class="lm-legend">{items}</ul>'
