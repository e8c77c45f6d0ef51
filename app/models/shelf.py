"""The models and unfinished downloads on this computer, with what is known of each. Deletes what the user
says."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from app.models.finder import Failure
from localmoe.core.errors import LocalMoeError, UnsupportedModelError
from localmoe.core.model_facts import ModelFacts
from localmoe.engine import import_all
from localmoe.hub.catalogue import LocalModel, list_models, models_folder, remove_made, remove_model
from localmoe.hub.draft_places import bytes_under, homes_of_others
from localmoe.hub.unfinished import UnfinishedDownload, list_unfinished
from localmoe.hub.weight_files import CONFIG_NAME


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


class Shelf:
    """Looks in a thread of its own, as reading configs takes time; `refresh` says when."""

    def __init__(
        self,
        facts: Callable[[str], ModelFacts] | None = None,
        models: Callable[[], list[LocalModel]] = list_models,
    ):
        """facts: `engine.facts.local_facts`, if nothing else; asked by name, as drafts are kept by it."""
        self._facts, self._models = facts or _local_facts, models
        self._lock = threading.Lock()
        self._view = ShelfView()
        self._known: dict[str, tuple[object, ModelFacts | Failure]] = {}  # by name, with `_state` then
        self._wanted = self._looking = self._closely = False

    def moves(self) -> bool:
        """Whether it is looking now."""
        with self._lock:
            return self._looking

    def view(self) -> ShelfView:
        """As last seen."""
        with self._lock:
            return self._view

    def refresh(self, *, closely: bool = False) -> None:
        """Look again, in the background; closely: also at what is known of each model, from now on."""
        with self._lock:
            self._wanted = True
            self._closely = self._closely or closely
            if self._looking:
                return
            self._looking = True
        threading.Thread(target=self._run, name="shelf", daemon=True).start()

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
                closely = self._closely
            models, unfinished = tuple(self._models()), tuple(list_unfinished(models_folder()))
            listed = [*(one.name for one in models), *(one.repo_id for one in unfinished)]
            left: Counter[str] = Counter()
            for name, home in homes_of_others(listed):
                left[name] += bytes_under(home)
            self._show(models, unfinished, left)
            for model in models if closely else ():
                state, (then, known) = _state(model), self._known.get(model.name, (None, None))
                if then != state or _may_be_mended(known):
                    self._known[model.name] = state, self._look_at(model)
                    self._show(models, unfinished, left)

    def _look_at(self, model: LocalModel) -> ModelFacts | Failure:
        try:
            return self._facts(model.name)
        except LocalMoeError as error:
            return Failure(type(error).__name__, str(error))

    def _show(
        self, models: tuple[LocalModel, ...], unfinished: tuple[UnfinishedDownload, ...],
        left: Mapping[str, int],
    ) -> None:  # fmt: skip
        known = {
            model.name: self._known[model.name][1]
            for model in models
            if self._known.get(model.name, (None,))[0] == _state(model)
        }
        new = ShelfView(models, unfinished, tuple(known.items()), tuple(left.items()))
        with self._lock:
            if replace(self._view, revision=0) != new:
                self._view = replace(new, revision=self._view.revision + 1)


def _local_facts(model: str) -> ModelFacts:
    """Imported in the shelf's thread, because torch takes seconds."""
    import_all()
    from localmoe.engine.facts import local_facts

    return local_facts(model)


def _may_be_mended(known: ModelFacts | Failure | None) -> bool:
    """Whether another look may find better: a damaged file is replaced by one of the same size."""
    return isinstance(known, Failure) and known.kind != UnsupportedModelError.__name__


def _state(model: LocalModel) -> object:
    """Another one once its files, its drafts or the file of its experts are others."""
    try:
        changed = (model.folder / CONFIG_NAME).stat().st_mtime_ns
    except OSError:
        changed = 0
    return replace(model, made_bytes=0), changed  # a draft that is being built grows all the time
