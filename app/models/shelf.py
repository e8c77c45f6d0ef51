"""The models and unfinished downloads on this computer, with what is known of each. Deletes what the user
says."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.models.finder import Failure
from app.models.looker import UnansweredError
from localmoe.core.errors import LocalMoeError, UnsupportedModelError
from localmoe.core.model_facts import ModelFacts
from localmoe.hub.catalogue import LocalModel, list_models, models_folder, remove_made, remove_model
from localmoe.hub.draft_places import bytes_under, homes_of_others
from localmoe.hub.unfinished import UnfinishedDownload, list_unfinished
from localmoe.hub.unfinished_records import remove_all_leftovers
from localmoe.hub.weight_files import CONFIG_NAME

ASK_AGAIN_S = 300.0  # about a model that the process which looks at them did not survive
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ShelfView:
    """facts: by model name; one without an entry is still looked at. left: what was made of models that are
    not listed, as of folders or of deleted ones: name as a file name, and bytes."""

    models: tuple[LocalModel, ...] = ()
    unfinished: tuple[UnfinishedDownload, ...] = ()
    facts: tuple[tuple[str, ModelFacts | Failure], ...] = ()
    left: tuple[tuple[str, int], ...] = ()
    revision: int = 0

    def facts_of(self, name: str) -> ModelFacts | Failure | None:
        """What is known of a model."""
        return dict(self.facts).get(name)


@dataclass(frozen=True, slots=True)
class _Known:
    """What was learnt of a model. state: `_state` then; round: the refresh that had it asked; at: seconds."""

    state: object
    facts: ModelFacts | Failure
    round: int
    at: float


class Shelf:
    """Lists in a thread of its own, as reading configs takes time, and asks what is known of each model in
    another, as an answer may take a minute; `refresh` says when."""

    def __init__(
        self,
        facts: Callable[[str], ModelFacts],
        models: Callable[[], list[LocalModel]] = list_models,
        clock: Callable[[], float] = time.monotonic,
    ):
        """facts: `Looker.facts`; asked by name, as drafts are kept by it. clock: seconds."""
        self._facts, self._models, self._clock = facts, models, clock
        self._lock = threading.Lock()
        self._view = ShelfView()
        self._states: dict[str, object] = {}  # of the models that are listed, by name
        self._known: dict[str, _Known] = {}  # by name
        self._round = 0
        self._wanted = self._looking = self._asking = self._closely = False
        self._closed = threading.Event()

    def moves(self) -> bool:
        """Whether it lists or asks now."""
        with self._lock:
            return self._looking or self._asking

    def view(self) -> ShelfView:
        """As last seen."""
        with self._lock:
            return self._view

    def refresh(self, *, closely: bool = False) -> None:
        """Look again, in the background; closely: also at what is known of each model, from now on."""
        with self._lock:
            self._wanted = True
            self._round += 1
            self._closely = self._closely or closely
            if self._looking:
                return
            self._looking = True
        threading.Thread(target=self._run, name="shelf", daemon=True).start()

    def look_ahead(self, quiet: Callable[[], bool]) -> None:
        """Look closely in the first quiet moment, before anybody asks: the process that does takes seconds to
        start."""

        def wait() -> None:
            while not quiet():
                if self._closed.wait(_POLL_S):
                    return
            self.refresh(closely=True)

        threading.Thread(target=wait, name="shelf-ahead", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def delete(self, name: str) -> int:
        """Remove a model, what was made of it and what an unfinished download of it left; the bytes freed.

        Raises:
            LocalMoeError: it is not localmoe's to delete, or the disk refuses.
        """
        try:
            return remove_model(name)
        finally:
            self.refresh()

    def delete_records(self, name: str) -> int:
        """Remove the file of a model's experts alone; the bytes freed. Raises as `delete`."""
        try:
            return remove_made(name, records_alone=True)
        finally:
            self.refresh()

    def delete_left(self, name: str) -> int:
        """Remove what was made of models of this name, as of `ShelfView.left`. Raises as `delete`."""
        try:
            return remove_made(name)
        finally:
            self.refresh()

    def _run(self) -> None:
        try:
            self._look()
        except BaseException:  # one that nobody foresaw: the next refresh looks again
            with self._lock:
                self._looking = False
            raise

    def _look(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._looking = False
                    return
                self._wanted = False
            remove_all_leftovers()  # else what they hold is missing wherever it is told what fits
            models, unfinished = tuple(self._models()), tuple(list_unfinished(models_folder()))
            listed = [*(one.name for one in models), *(one.repo_id for one in unfinished)]
            left: Counter[str] = Counter()
            for name, home in homes_of_others(listed):
                left[name] += bytes_under(home)
            states = {model.name: _state(model) for model in models}
            with self._lock:
                self._states = states
                self._show(models, unfinished, tuple(left.items()))
                begins = self._closely and not self._asking and self._due() is not None
                self._asking = self._asking or begins
            if begins:
                threading.Thread(target=self._ask_all, name="shelf-facts", daemon=True).start()

    def _ask_all(self) -> None:
        """Of each model that is due, until there is none."""
        try:
            while self._ask_next():
                pass
        except BaseException:  # one that nobody foresaw: the next refresh asks again
            with self._lock:
                self._asking = False
            raise

    def _ask_next(self) -> bool:
        with self._lock:
            name, round_ = self._due(), self._round
            if name is None or self._closed.is_set():
                self._asking = False
                return False
            state = self._states[name]
        try:
            facts: ModelFacts | Failure = self._facts(name)
        except LocalMoeError as error:
            facts = Failure(type(error).__name__, str(error))
        with self._lock:
            self._known[name] = _Known(state, facts, round_, self._clock())
            self._show(self._view.models, self._view.unfinished, self._view.left)
        return True

    def _due(self) -> str | None:
        """The next model to ask about, whose files changed since, or that may have been mended: a damaged
        file is replaced by one of the same size. The lock is held."""
        for name, state in self._states.items():
            known = self._known.get(name)
            if known is None or known.state != state:
                return name
            if not isinstance(known.facts, Failure) or known.facts.kind == UnsupportedModelError.__name__:
                continue
            rests = known.facts.kind == UnansweredError.__name__ and self._clock() - known.at < ASK_AGAIN_S
            if known.round < self._round and not rests:
                return name
        return None

    def _show(
        self,
        models: tuple[LocalModel, ...],
        unfinished: tuple[UnfinishedDownload, ...],
        left: tuple[tuple[str, int], ...],
    ) -> None:
        """The lock is held."""
        known = {
            name: self._known[name].facts
            for name, state in self._states.items()
            if name in self._known and self._known[name].state == state
        }
        new = ShelfView(models, unfinished, tuple(known.items()), left)
        if replace(self._view, revision=0) != new:
            self._view = replace(new, revision=self._view.revision + 1)


def _state(model: LocalModel) -> object:
    """Another one once its files, its drafts or the file of its experts are others."""
    try:
        changed = (model.folder / CONFIG_NAME).stat().st_mtime_ns
    except OSError:
        changed = 0
    return replace(model, made_bytes=0), changed  # a draft that is being built grows all the time
