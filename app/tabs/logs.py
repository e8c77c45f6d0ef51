"""The frame of the Logs tab in the page's language; its script (static/logs.js) fills it while it is in
sight."""

from __future__ import annotations

from html import escape
from pathlib import Path

from app.texts import ENGLISH, Texts

_LEVELS = {"info": "everything", "warning": "warnings and errors", "error": "errors only"}


def logs_html(path: Path, t: Texts = ENGLISH) -> str:
    """path: of the log's file."""
    levels = "".join(f'<option value="{name}">{escape(t(text))}</option>' for name, text in _LEVELS.items())
    done = escape(t("Copied"))
    privacy = t("The log has figures, names of models and errors, never what you write.")
    return (
        f'<div class="lm-logs"><div class="lm-logs-bar"><label>{escape(t("Show"))} '
        f"<select data-log-level>{levels}</select></label>"
        f'<label><input type="checkbox" data-log-follow checked> {escape(t("Follow"))}</label>'
        f'<button type="button" class="lm-act" data-log-copy data-done="{done}">{escape(t("Copy"))}</button>'
        f'<a class="lm-act" href="/log/file" download="localmoe.log">{escape(t("Download"))}</a>'
        f'<span title="{escape(str(path))}">{escape(privacy)}</span></div>'
        f'<div data-log-lines data-level="info" tabindex="0" role="log" aria-live="off" '
        f'aria-label="{escape(t("Log"))}"></div></div>'
    )
