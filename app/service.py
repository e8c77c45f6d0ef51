"""What the page can ask for: send, stop, retry, edit, chats, settings. Knows no widget; every refusal is a
LocalMoeError of one sentence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.chats import ChatError, ChatMessage, ChatStore, check_id
from app.engine_holder import EngineHolder
from app.engine_status import EngineLoader
from app.jobs import GenerationJob, JobRunner
from app.settings import LoadSettings, SettingsStore, check_answers
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError, LocalMoeError
from localmoe.core.types import Message
from localmoe.core.units import format_bytes

MAX_MESSAGE = 1_000_000  # characters


class ChatService:
    """The state behind every open page of this process."""

    def __init__(
        self,
        home: Path,
        engine_loader: EngineLoader,
        list_models: Callable[[], Sequence[tuple[str, str]]],
    ) -> None:
        """`list_models` gives (label, value) of the models on this machine; `home` is where files go."""
        self.home = home
        self.chats = ChatStore(home / "chats")
        self.store = SettingsStore(home / "settings.json")
        self.runner = JobRunner()
        self.holder = EngineHolder(engine_loader, self.runner.stop_and_wait, self._keep_load)
        self.list_models = list_models
        self._asking = threading.Lock()  # two clicks at once make one turn
        self.load_settings = self.store.load
        self.answers = self.store.answers
        self._to_keep: LoadSettings | None = None  # applied, and kept once they have led to a loaded model

    # --- chats ---------------------------------------------------------------------------------------------

    def send(self, chat_id: str | None, text: str) -> str:
        """Begin the answer to `text` in this chat, or in a new one; the id of the chat."""
        question = ChatMessage("user", _check_text(text), time.time())
        with self._asking:
            self._check_ready()
            if chat_id is None:
                chat_id = self.chats.create((question,)).id
            else:
                self.chats.set_messages(chat_id, (*self.chats.get(chat_id).messages, question))
            self._answer(chat_id)
        return chat_id

    def retry(self, chat_id: str) -> str:
        """Write the last answer anew."""
        with self._asking:
            self._check_ready()
            chat = self.chats.get(chat_id)
            last = chat.last_user_index()
            if last is None:
                raise ChatError("There is no message to answer yet.")
            self.chats.set_messages(chat_id, chat.messages[: last + 1])
            self._answer(chat_id)
        return chat_id

    def edit(self, chat_id: str, index: int, text: str) -> str:
        """Change a user message and answer it anew; the id of the chat that goes on. Editing an earlier
        message goes on in a copy, so that the turns after it are not lost."""
        question = ChatMessage("user", _check_text(text), time.time())
        with self._asking:
            self._check_ready()
            chat = self.chats.get(chat_id)
            if not 0 <= index < len(chat.messages) or chat.messages[index].role != "user":
                raise ChatError("Only your own messages can be edited.")
            messages = (*chat.messages[:index], question)
            if index == chat.last_user_index():
                self.chats.set_messages(chat_id, messages)
            else:
                chat_id = self.chats.create(messages, title=f"{chat.title} (edited)").id
            self._answer(chat_id)
        return chat_id

    def delete(self, chat_id: str) -> None:
        """Remove a chat; an answer being written in it ends."""
        with self._asking:
            self.chats.get(chat_id)
            if self.runner.running(chat_id):
                self.runner.stop()
            self.chats.delete(chat_id)

    def chat_to_open(self, wanted: object) -> str | None:
        """The chat that a page shows first: the wanted one, else the one being answered, else the latest."""
        known = {chat.id for chat in self.chats.list()}
        if isinstance(wanted, str) and wanted in known:
            return check_id(wanted)
        view = self.runner.view()
        if view is not None and view.finish is None and view.chat_id in known:
            return view.chat_id
        return next((chat.id for chat in self.chats.list()), None)

    def _check_ready(self) -> None:
        self.runner.check_free()
        self.holder.engine()

    def _answer(self, chat_id: str) -> None:
        engine = self.holder.engine()
        settings = self.answers
        request = GenerationRequest(
            messages=request_messages(self.chats.get(chat_id).messages, settings.system_prompt),
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling(),
            draft_length=settings.draft_length,
            policy=settings.policy,
            strict=settings.strict,
            draft_only=settings.approximate,
        )
        holder = self.holder
        job = GenerationJob(
            engine, request, chat_id, self.chats, lambda: holder.note_memory(engine),
            lambda failure: holder.note_out_of_memory(engine, failure),
        )  # fmt: skip
        self.runner.start(job)

    # --- settings ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the chosen model in the background."""
        self.holder.load(self.load_settings.model, self.load_settings.engine_config(self.answers))

    def set_answers(self, values: Mapping[str, object]) -> str:
        """Check and keep what holds from the next answer on; a sentence for the page."""
        answers = check_answers(values)
        self.answers = answers
        self.store.save(answers=answers)
        if answers.draft_length != 0 and self.holder.config.draft_length == 0:
            return "Saved. Drafting was off when the model was loaded: press Apply to load it with its draft."
        return "Saved: it holds from the next answer on."

    def apply_load(self, wanted: LoadSettings) -> str:
        """Resize or load again, whichever the change needs; a sentence for the page."""
        if not self.runner.running():
            self.runner.check_free()  # a benchmark would measure two settings as one
        wanted = replace(wanted, model=wanted.model.strip())
        config = wanted.engine_config(self.answers)
        before = self.holder.config
        has_draft = config.draft_length == 0 or before.draft_length != 0  # or needs none
        if has_draft and self._differs_in_better_draft_alone(wanted):
            return self._apply_better_draft(wanted, config.improve_draft)
        if self.runner.running():
            raise ConfigError("An answer is being written: wait for its end or press Stop, then apply again.")
        if self.applies_live(wanted):
            plan = self.holder.resize(config.vram_budget_bytes)
            self.holder.improve_draft(config.improve_draft)
            self.store.save(load=wanted)
            sentence = f"Applied: the engine now uses {format_bytes(plan.budget_bytes)}."
        else:
            self._to_keep = wanted
            self.holder.load(wanted.model, config)
            sentence = ""  # the page shows how far the load is
        self.load_settings = wanted
        return sentence

    def applies_live(self, wanted: LoadSettings) -> bool:
        """Whether these settings need no load: the loaded model can take them as it is.

        Raises:
            ConfigError: one is out of range.
        """
        config, before = wanted.engine_config(self.answers), self.holder.config
        live = replace(
            config, vram_budget_bytes=before.vram_budget_bytes, improve_draft=before.improve_draft,
            draft_length=before.draft_length, policy=before.policy,
        )  # fmt: skip
        has_draft = config.draft_length == 0 or before.draft_length != 0
        same = wanted.model.strip() == self.load_settings.model and live == before
        return same and has_draft and self.holder.status().phase == "ready"

    def _differs_in_better_draft_alone(self, wanted: LoadSettings) -> bool:
        """Whether the switch of the better draft is all that changes in a model that is loaded or loading."""
        before = self.load_settings
        switched = replace(before, better_draft=wanted.better_draft)
        return wanted == switched != before and self.holder.status().phase != "error"

    def _apply_better_draft(self, wanted: LoadSettings, on: bool) -> str:
        """Begin or end the build; no answer and no load is disturbed."""
        self.load_settings = wanted
        if self._to_keep is not None:  # kept with the load under way
            self._to_keep = wanted
        else:
            self.store.save(load=wanted)
        self.holder.improve_draft(on)
        if not on:
            return "Saved: no better draft is built; what was finished of one is kept."
        try:
            reason = self.holder.engine().why_no_better_draft()
        except LocalMoeError:
            reason = ""  # it is still loading
        if reason:
            return f"Saved. There is nothing to build for this model now: {reason}."
        return "Saved: a better draft is built in the pauses between answers."

    def _keep_load(self) -> None:
        wanted, self._to_keep = self._to_keep, None
        if wanted is not None:
            self.store.save(load=wanted)

    def reports(self) -> list[str]:
        """Sentences on files that could not be read at the start."""
        return [*self.chats.reports, *([self.store.report] if self.store.report else [])]

    def close(self) -> None:
        """End the answer (its text is kept), cancel a load, free the engine."""
        self.runner.stop_and_wait()
        self.holder.close()


def request_messages(messages: Sequence[ChatMessage], system_prompt: str) -> tuple[Message, ...]:
    """What the model is given: the system prompt, the turns that have an answer, and the last question."""
    turns = [Message("system", system_prompt)] if system_prompt.strip() else []
    for index, message in enumerate(messages):
        answer = messages[index + 1] if index + 1 < len(messages) else None
        if message.role == "user" and answer is None:
            turns.append(Message("user", message.content))
        elif message.role == "user" and answer is not None and answer.role == "assistant" and answer.content:
            turns += [Message("user", message.content), Message("assistant", answer.content)]
    return tuple(turns)


def _check_text(text: str) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8").strip()
    if not text:
        raise ChatError("The message is empty: write something first.")
    if len(text) > MAX_MESSAGE:
        raise ChatError(f"The message has {len(text):,} characters: send at most {MAX_MESSAGE:,}.")
    return text
