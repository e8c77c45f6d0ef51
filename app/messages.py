"""Chat messages as the page's Chatbots want them. Text goes in with its tags as text; what is taken for HTML
all the same the Chatbot sanitises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.answer_html import WAITING, answer_parts
from app.chats import Chat, ChatMessage
from app.jobs import JobView
from app.tag_text import tags_as_text
from app.texts import ENGLISH, Texts
from app.words import answer_line

Entry = dict[str, Any]


def split_turns(chat: Chat | None) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage]]:
    """Finished history, and the last turn, which alone is drawn again while it grows."""
    if chat is None:
        return (), ()
    last = chat.last_user_index()
    cut = len(chat.messages) if last is None else last
    return chat.messages[:cut], chat.messages[cut:]


def history_entries(
    messages: Sequence[ChatMessage], t: Texts = ENGLISH, *, coloured: bool = False
) -> list[Entry]:
    """Entries of finished turns. coloured: what was accepted from the draft is."""
    return [_entry(message, t, coloured) for message in messages]


def turn_entries(
    messages: Sequence[ChatMessage], job: JobView | None, t: Texts = ENGLISH, *, coloured: bool = False
) -> list[Entry]:
    """Entries of the last turn; `job` is the answer being written in it, if one is."""
    if job is None or job.finish is not None:
        entries = [_entry(message, t, coloured) for message in messages]
        if messages and messages[-1].role != "assistant":
            text = f"*({t('not answered yet: press Retry')})*"
            entries.append(_entry(ChatMessage("assistant", text, finish="stop"), t, False))
        elif messages and (refusal := _refusal(messages[-1], job)):
            entries[-1]["content"].append(_error(refusal))
        return entries
    return [
        *(_entry(message, t, coloured) for message in messages if message.role == "user"),
        {"role": "assistant", "content": [_text(part) for part in running_parts(job, t, coloured=coloured)]},
    ]


def _refusal(answer: ChatMessage, job: JobView | None) -> str:
    """What the disk said of the answer of this job, which no file can keep; "" if it took it."""
    if job is None or job.started != answer.created or job.error == answer.error:
        return ""
    return job.error


def running_parts(
    job: JobView, t: Texts = ENGLISH, *, coloured: bool = False, waits_for: str = ""
) -> list[str]:
    """The parts of an answer's entry while it is written; at least one. waits_for: see answer_parts."""
    parts = answer_parts(job.text, job.thought_s, job.runs if coloured else (), True, t, waits_for)
    if job.stats is not None and job.stats.approximate:
        parts.append(f'<p class="lm-line">{t("approximate: written by the draft alone")}</p>')
    return parts


def _entry(message: ChatMessage, t: Texts, coloured: bool) -> Entry:
    content = [_text(tags_as_text(message.content) or ("" if message.images else WAITING))]
    if message.role == "assistant":
        runs = message.runs if coloured else ()
        content = [_text(part) for part in answer_parts(message.content, message.thought_s, runs, False, t)]
        line = answer_line(message.stats, message.finish, t)
        if message.error:
            content.append(_error(message.error))
        if not content:
            content.append(_text(f"*({t('an empty answer')})*"))
        if line:
            legend = f" · <mark>{_escape(t('accepted from the draft'))}</mark>" if runs else ""
            content.append(_text(f'<p class="lm-line">{_escape(line)}{legend}</p>'))
    return {"role": message.role, "content": content}


def _text(text: str) -> Entry:
    return {"type": "text", "text": text}


def _error(sentence: str) -> Entry:
    return _text(f'<p class="lm-error">{_escape(sentence)}</p>')


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
