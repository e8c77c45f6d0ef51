"""An answer's text as the Chatbot shows it: thoughts folded, and, if wished for, who wrote which part.
All that is HTML here is made of escaped text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from app import words
from app.tag_text import tags_as_text
from app.texts import ENGLISH, Texts
from localmoe.chat.reasoning import split_reasoning

WAITING = "…"


def answer_parts(
    text: str, thought_s: float, runs: Sequence[int], running: bool, t: Texts = ENGLISH, waits_for: str = ""
) -> list[str]:
    """Markdown and HTML of an answer, part by part. waits_for: what is said in its place, beside that it is
    waited for. runs: colour the parts that were accepted from the draft,
    which shows the text as it was written, without its formatting; empty: do not."""
    split = split_reasoning(text)
    parts = []
    if split.thoughts or not split.finished:
        parts.append(_thoughts_html(split.thoughts, _title(split.finished, thought_s, running, t)))
    if split.answer:
        start = len(text) - len(split.answer)
        parts.append(_coloured(text, start, runs) if runs else tags_as_text(split.answer, layout=True))
    elif running and split.finished:
        line = f'<p class="lm-line">{WAITING} {_escape(waits_for)}</p>'
        parts.append(line if waits_for else WAITING)
    return parts


def _title(finished: bool, thought_s: float, running: bool, t: Texts) -> str:
    time = words.seconds(thought_s) if thought_s < 60 else f"{thought_s / 60:.1f} min"
    if finished:
        return t("Thought for {time}", time=time) if thought_s else t("Thoughts")
    if running:
        return t("Thinking … {time}", time=f"{thought_s:.0f} s")
    return t("Stopped while thinking, after {time}", time=time)


def _thoughts_html(thoughts: str, title: str) -> str:
    """One line without a blank one, which would end the HTML in Markdown; line ends are written as
    entities."""
    return (
        f'<details class="lm-think"><summary>{_escape(title)}</summary>'
        f"<pre>{_escape(thoughts)}</pre></details>"
    )


def _coloured(text: str, start: int, runs: Sequence[int]) -> str:
    ends = list(accumulate(runs))
    parts = []
    for place, end in enumerate(ends):
        piece = text[max(start, end - runs[place]) : end] if end > start else ""
        if piece:
            parts.append(f"<mark>{_escape(piece)}</mark>" if place % 2 else _escape(piece))
    return f'<pre class="lm-tokens">{"".join(parts)}</pre>'


def _escape(text: str) -> str:
    """For HTML within Markdown: nothing in it is markup of either."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("\r", "").replace("\n", "&#10;")
