"""The page's hidden note of what it shows, and the empty frames that its script (static/now.js) fills.
Decides nothing."""

from __future__ import annotations

from html import escape


def mark_html(chat_id: str | None, asked: int, running: bool, epoch: str, stamp: int) -> str:
    """What the page shows: its chat, the questions in its last turn (1, or 0 in an empty chat), whether an
    answer is written, the service's state (`NowView.epoch`) and the user's last action (`View.stamp`)."""
    shown = f'data-chat="{escape(chat_id or "")}" data-asked="{asked}" data-running="{running:d}"'
    return f'<i hidden {shown} data-epoch="{escape(epoch)}" data-stamp="{stamp}"></i>'


def frame_html(name: str) -> str:
    """Where the part `name` of /now goes."""
    return f'<div data-part="{name}"></div>'
