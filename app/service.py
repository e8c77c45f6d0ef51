"""What the page can ask for: send, stop, retry, edit, chats, settings. Knows no widget; every refusal is a
LocalMoeError of one sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from app.answer_text import to_continue, unfinished
from app.chat_transfer import import_chat
from app.chats import Chat, ChatError, ChatMessage, ChatStore, check_id
from app.context_meter import has_room_to_continue
from app.engine_holder import EngineHolder
from app.engine_status import EngineLike, EngineLoader, ReadyEngine
from app.files import remove_unfinished
from app.jobs import GenerationJob, JobRunner, JobRunningError, Place
from app.live import LiveMonitor
from app.load_change import better_draft_sentence, differs_in_better_draft_alone, takes_live
from app.logs import LogBook
from app.pictures import PictureStore
from app.presets import Presets
from app.requests import make_question, make_request
from app.settings import LoadSettings, SettingsStore, check_answers
from localmoe.core.errors import ConfigError
from localmoe.core.units import format_bytes


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
        for folder in (home, home / "chats", home / "benchmarks", home / "run"):
            remove_unfinished(folder)
        self.chats = ChatStore(home / "chats")
        self.pictures = PictureStore(home / "images")
        self.pictures.remove_unused(self.chats.pictures())
        self.store = SettingsStore(home / "settings.json")
        self.presets = Presets(home / "presets.json")
        self.runner = JobRunner()
        self.holder = EngineHolder(engine_loader, self.runner.stop_and_wait, self._on_ready)
        self.live = LiveMonitor(self.holder.engine)
        self.logs = LogBook(home / "logs")
        self.list_models = list_models
        self.asking = threading.Lock()  # who begins an answer or a benchmark, or changes the engine
        self._changing = threading.Lock()  # two windows may change settings for answers at once
        self.load_settings, self.answers = self.store.load, self.store.answers
        self._to_keep: LoadSettings | None = None  # applied, and kept once they have led to a loaded model

    # --- chats ---------------------------------------------------------------------------------------------

    def send(self, chat_id: str | None, text: str, images: Sequence[str] = ()) -> str:
        """Begin the answer to `text`, and to pictures of these ids, in this chat, or in a new one; its id."""
        question = make_question(text, images)

        def asked() -> Chat:
            self.pictures.check(images)
            if chat_id is None:
                return self.chats.create((question,))
            chat = self.chats.get(chat_id)
            self.pictures.check(chat.images)
            return self.chats.add(chat_id, question, chat.tree.leaf)

        with self.asking:
            return self._answer(self._ready_engine(), asked)

    def retry(self, chat_id: str) -> None:
        """Write the last answer anew; the one that is there stays beside it, unless it has no text."""
        with self.asking:
            engine = self._ready_engine()
            chat = self.chats.get(chat_id)
            self.pictures.check(chat.images)
            path, last = chat.tree.path(), chat.last_user_index()
            if last is None:
                raise ChatError("There is no message to answer yet.")
            empty = next((node for node in path[last + 1 :] if not chat.tree.nodes[node].content), None)
            self._answer(engine, lambda: self.chats.end_at(chat_id, path[last]), replaced=empty)

    def continue_answer(self, chat_id: str) -> None:
        """Let the model go on with the last answer, from its text."""
        with self.asking:
            engine = self._ready_engine()
            chat = self.chats.get(chat_id)
            self.pictures.check(chat.images)
            if not self.can_continue(chat):
                raise ChatError("There is no unfinished answer that the model could go on with.")
            before = to_continue(chat.messages[-1])
            self._answer(engine, lambda: chat, replaced=chat.tree.leaf, before=before)

    def can_continue(self, chat: Chat) -> bool:
        """Whether the last answer was stopped or cut, and the context has room for more of it."""
        info, messages = self.holder.status().info, chat.messages
        if info is None or len(messages) < 2 or messages[-2].role != "user" or not unfinished(messages[-1]):
            return False
        return has_room_to_continue(chat, info.context)

    def edit(self, chat_id: str, node: int, text: str, images: Sequence[str] | None = None) -> None:
        """Ask a message anew, with its pictures or with others; what followed the old one stays beside it."""
        with self.asking:
            engine = self._ready_engine()
            chat = self.chats.get(chat_id)
            tree = chat.tree
            if not 0 <= node < len(tree.nodes) or tree.nodes[node].role != "user":
                raise ChatError("Only your own messages can be edited.")
            question = make_question(text, tree.nodes[node].images if images is None else images)
            before = replace(chat, tree=tree.ending_at(tree.parents[node]))
            self.pictures.check((*before.images, *question.images))
            self._answer(engine, lambda: self.chats.add(chat_id, question, tree.parents[node]))

    def show(self, chat_id: str, node: int) -> None:
        """Show another version of a message, and what followed it."""
        with self.asking:
            if self.runner.running(chat_id):
                raise JobRunningError(
                    "This chat is being answered: wait for the end, or press Stop, to see its other versions."
                )
            self.chats.show(chat_id, node)

    def delete(self, chat_id: str) -> None:
        """Remove a chat, with the pictures that it alone has; an answer being written in it ends."""
        with self.asking:
            nodes = self.chats.get(chat_id).tree.nodes
            if self.runner.running(chat_id):
                self.runner.stop()
            self.chats.delete(chat_id)
            sent = {one: node.created for node in nodes for one in node.images}  # the latest version is last
            used = self.chats.pictures() if sent else set()
            if used is not None:
                self.pictures.remove_sent({one: at for one, at in sent.items() if one not in used})

    def import_chat(self, data: bytes) -> str:
        """Take an exported chat; its new id.

        Raises:
            ChatImportError: the file holds none.
            PictureError, ChatSaveError: the disk refuses.
        """
        found = import_chat(data)
        for picture in found.pictures.values():
            self.pictures.keep(picture)
        return self.chats.keep(found.chat).id

    def chat_to_open(self, wanted: object) -> str | None:
        """The chat that a page shows first: the wanted one, else the one being answered, else the latest."""
        known = {chat.id for chat in self.chats.list()}
        if isinstance(wanted, str) and wanted in known:
            return check_id(wanted)
        view = self.runner.view()
        if view is not None and view.finish is None and view.chat_id in known:
            return view.chat_id
        return next((chat.id for chat in self.chats.list()), None)

    def _ready_engine(self) -> ReadyEngine:
        """The loaded engine, for an answer that may begin now. Asked for, and about itself, before a chat is
        changed: whatever becomes of it then, the question gets an answer, or the sentence that says why not.
        """
        self.runner.check_free()
        engine = self.holder.engine()
        return ReadyEngine(engine, engine.info(), engine.plan.drafting)

    def _answer(
        self,
        ready: ReadyEngine,
        change: Callable[[], Chat],
        replaced: int | None = None,
        before: ChatMessage | None = None,
    ) -> str:
        """Change the chat and answer its shown branch's last question, or leave it as it is where none must
        begin; its id. replaced: the node of an answer to overwrite; before: that answer, if it goes on."""

        def make() -> GenerationJob:
            chat = change()
            messages = chat.messages[: (chat.last_user_index() or 0) + 1]
            own = ready.info.own_sampling
            request = partial(
                make_request, messages, self.answers, before, read=self.pictures.read, drafts=ready.drafts,
                own=own,
            )  # fmt: skip
            place = Place(chat.id, chat.tree.path()[len(messages) - 1], replaced, before)
            return GenerationJob(
                ready.engine, request, place, self.chats, ready.info.link,
                partial(self.holder.note_memory, ready.engine),
                partial(self._on_end, ready.engine, self.live.begin_answer()),
                partial(self.holder.note_out_of_memory, ready.engine),
            )  # fmt: skip

        return self.runner.start(make).view().chat_id

    def _on_end(self, engine: EngineLike, number: int) -> None:
        self.live.end_answer(engine, number)
        self.holder.capture_ahead(self.answers.sampling)

    # --- settings ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the chosen model in the background."""
        self.holder.load(self.load_settings.model, self.load_settings.engine_config(self.answers))

    def set_answers(self, changed: Mapping[str, object]) -> str:
        """Check and keep what holds from the next answer on, all else as it is; a sentence for the page."""
        with self._changing:
            answers = check_answers({**asdict(self.answers), **changed})
            self.store.save(answers=answers)
            self.answers = answers
        self.holder.capture_ahead(answers.sampling)
        if answers.draft_length != 0 and self.holder.config.draft_length == 0:
            return "Saved. Drafting was off when the model was loaded: press Apply to load it with its draft."
        return "Saved: it holds from the next answer on."

    def apply_load(self, wanted: LoadSettings) -> str:
        """Resize or load again, whichever the change needs; a sentence for the page."""
        with self.asking:  # nobody begins an answer on an engine that is about to change
            return self._apply_load(wanted)

    def _apply_load(self, wanted: LoadSettings) -> str:
        if not self.runner.running():
            self.runner.check_free()  # a benchmark would measure two settings as one
        wanted = replace(wanted, model=wanted.model.strip())
        config = wanted.engine_config(self.answers)
        before = self.holder.config
        has_draft = config.draft_length == 0 or before.draft_length != 0  # or needs none
        if has_draft and differs_in_better_draft_alone(self.holder, self.load_settings, wanted):
            return self._apply_better_draft(wanted, config.improve_draft)
        if self.runner.running():
            raise ConfigError("An answer is being written: wait for its end or press Stop, then apply again.")
        if self.applies_live(wanted):
            self.runner.settle()  # a stopped answer's last step may still run
            plan = self.holder.resize(config.vram_budget_bytes)
            self.holder.improve_draft(config.improve_draft)
            self.load_settings = wanted
            sentence = f"Applied: the engine now uses {format_bytes(plan.budget_bytes)}."
            self._save_load(wanted, sentence)
            return sentence
        self._to_keep = wanted
        self.holder.load(wanted.model, config)
        self.load_settings = wanted
        return ""  # the page shows how far the load is

    def applies_live(self, wanted: LoadSettings) -> bool:
        """Whether these settings need no load: the loaded model can take them as it is.

        Raises:
            ConfigError: one is out of range.
        """
        return takes_live(self.holder, self.load_settings, wanted, self.answers)

    def _apply_better_draft(self, wanted: LoadSettings, on: bool) -> str:
        """Begin or end the build; no answer and no load is disturbed."""
        self.load_settings = wanted
        self.holder.improve_draft(on)
        if self._to_keep is not None:  # kept with the load under way
            self._to_keep = wanted
        else:
            self._save_load(wanted, "Applied.")
        return better_draft_sentence(self.holder, on=on)

    def _on_ready(self) -> None:
        """In the load's thread, where nobody waits for an answer."""
        wanted, self._to_keep = self._to_keep, None
        if wanted is not None:
            try:
                self._save_load(wanted, "The model is loaded.")
            except ConfigError as error:
                self.holder.note(str(error))
        self.holder.capture_ahead(self.answers.sampling)

    def _save_load(self, wanted: LoadSettings, done: str) -> None:
        """Keep settings that hold already; done: what to say before the refusal of the disk."""
        try:
            self.store.save(load=wanted)
        except ConfigError as error:
            raise ConfigError(f"{done} {error}") from error
        self.holder.note("")

    def reports(self) -> list[str]:
        """Sentences on files that could not be read at the start."""
        return [*self.chats.reports, *filter(None, (self.store.report, self.presets.report))]

    def close(self) -> None:
        """End the answer (its text is kept), cancel a load, free the engine."""
        self.runner.stop_and_wait()
        self.chats.save_unsaved()
        self.holder.close()
