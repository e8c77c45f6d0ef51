"""What moves while an answer is written (its text, the panel, the context meter), and whether the rest of a
page is out of date, for the page's script. Remembers no page: each one says what it shows."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.chats import Chat, ChatError
from app.context_meter import context_use, meter_html
from app.engine_holder import EngineNotReadyError
from app.engine_status import EngineStatus
from app.job_view import JobView
from app.messages import running_parts
from app.panel import panel_html
from app.service import ChatService
from app.status_html import header_html, news_html, share_html
from app.texts import Language, Texts, texts_for
from app.typed import NOTHING, Typed
from app.words import prompt_line
from localmoe.core.errors import EngineClosedError

ANSWERING_S, LOADING_S, IDLE_S = 0.2, 0.5, 1.5  # until a page asks again
MAX_SHARE = 0.01  # of a core, for what one page is told; more is told more seldom
HIDDEN = "hidden"  # a page's key of a panel that is out of sight


@dataclass(frozen=True, slots=True)
class Asked:
    """What a page shows: its chat, its language, by the keys that it was told the parts that move, and how
    many tokens are being written into its box."""

    chat_id: str = ""
    language: Language = "en"
    turn: str = ""
    panel: str = ""
    meter: str = ""
    typed: Typed = NOTHING


def turn_key(chat_id: str | None, revision: int, job: JobView | None, coloured: bool) -> str:
    """Of the last turn, but not of how far its answer is: a page puts new text only into the turn that it
    shows.

    Args:
        revision: of the chats.
        job: the last answer of this chat.
    """
    running = job.started if job is not None and job.finish is None else None
    return repr((chat_id, revision, running, coloured))


class NowView:
    """Of one service; its methods take well under a millisecond and wait for nothing. Any thread may call
    them."""

    def __init__(self, service: ChatService, clock: Callable[[], float] = time.time) -> None:
        """clock: by which answers are started."""
        self._service, self._clock = service, clock
        self._start = secrets.token_hex(4)  # keys of an earlier process mean nothing
        self._status: tuple[tuple[int, bool], int] = ((-1, False), 0)
        self._panel: dict[str, tuple[str, str]] = {}  # language -> the last one's key and HTML, for all pages

    def epoch(self) -> str:
        """Changes with all that a page shows and that does not come by `tell`."""
        service, job = self._service, self._service.runner.view()
        status = service.holder.status()
        running = job is not None and job.finish is None
        answering = (job.chat_id, job.started) if job is not None and running else None
        shown = (service.chats.revision, answering, service.answers, service.load_settings)
        return f"{self._start}{hash((shown, self._status_key(status, running))):x}"

    def tell(self, asked: Asked) -> dict[str, object]:
        """For /now: `epoch`; `wait`, seconds until the next question; and of turn, panel and meter those that
        the page does not show already."""
        began = time.thread_time()
        epoch = self.epoch()
        status, job = self._service.holder.status(), self._service.runner.view()
        running = job is not None and job.finish is None
        told: dict[str, object] = {
            "epoch": epoch, **self._tell_panel(asked, status, job), **self._tell_chat(asked, status, job)
        }  # fmt: skip
        wait_s = ANSWERING_S if running else LOADING_S if status.phase == "loading" else IDLE_S
        return {**told, "wait": max(wait_s, (time.thread_time() - began) / MAX_SHARE)}

    def _tell_panel(self, asked: Asked, status: EngineStatus, job: JobView | None) -> dict[str, object]:
        live, moved = self._service.live, (job.started, job.revision) if job is not None else None
        key = f"{self._start}{hash((status.revision, moved, live.revision)):x}{asked.language}"
        if asked.panel in (key, HIDDEN):
            return {}
        kept, html = self._panel.get(asked.language, ("", ""))
        if kept != key:
            html = panel_html(status, job, texts_for(asked.language), live.bound)
            self._panel[asked.language] = key, html
        return {"panel": {"key": key, "html": html}}

    def _tell_chat(self, asked: Asked, status: EngineStatus, job: JobView | None) -> dict[str, object]:
        chat, t = self._chat(asked.chat_id), texts_for(asked.language)
        told: dict[str, object] = {}
        use = context_use(chat, status.info.context, asked.typed) if status.info is not None else None
        html = meter_html(use, self._service.answers.max_new_tokens, t)
        key = f"{self._start}{hash(html):x}"
        if key != asked.meter:
            told["meter"] = {"key": key, "html": html}
        if chat is None or job is None or job.finish is not None or job.chat_id != chat.id:
            return told
        coloured = self._service.answers.show_drafted
        place = turn_key(chat.id, self._service.chats.revision, job, coloured)
        waits_for = "" if job.text else self._waits_for(job, t)
        key = f"{place} {job.revision} {waits_for}"
        if key != asked.turn:
            parts = running_parts(job, t, coloured=coloured, waits_for=waits_for)
            told["turn"] = {"key": key, "of": place, "parts": parts}
        return told

    def _waits_for(self, job: JobView, t: Texts) -> str:
        try:
            prompt = self._service.holder.engine().live.prompt()
        except (EngineClosedError, EngineNotReadyError):
            return ""
        return prompt_line(prompt, self._clock() - job.started, t)

    def _chat(self, chat_id: str) -> Chat | None:
        if not chat_id:
            return None
        try:
            return self._service.chats.get(chat_id)
        except ChatError:
            return None  # deleted in another window

    def _status_key(self, status: EngineStatus, running: bool) -> int:
        """Of what a page shows of the engine, which changes more seldom than the engine's status."""
        of, key = self._status
        if of != (status.revision, running):
            key = hash((header_html(status), news_html(status), share_html(status, running)))
            self._status = (status.revision, running), key
        return key
