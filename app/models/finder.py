"""What the user searched for on the Hub, and what is known of each model found. Asks only when the user
does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from app.unicode_text import whole_unicode
from localmoe.core.errors import LocalMoeError
from localmoe.core.model_facts import ModelFacts
from localmoe.hub.search import SearchHit, find_repo

MAX_LOOKED_AT = 12  # models of a search whose config is read
KNOWN_FOR_S = 300.0  # that a search does not ask again: the commit that it names is what would be got
_PARALLEL = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """kind: the error's class, which says what ways on there are."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """The state of a search. facts: by repo id, or why there are none; a repo without an entry is still
    looked at, or was not."""

    query: str = ""
    phase: Literal["idle", "searching", "done", "failed"] = "idle"
    hits: tuple[SearchHit, ...] = ()
    facts: Mapping[str, ModelFacts | Failure] = field(default_factory=lambda: MappingProxyType({}))
    failure: Failure | None = None
    revision: int = 0


class Finder:
    """One search at a time; a new one takes the old one's place."""

    def __init__(self, call: Callable[..., Any], clock: Callable[[], float] = time.monotonic) -> None:
        """call: `HubClient.call`. clock: seconds."""
        self._call, self._clock = call, clock
        self._lock = threading.Lock()
        self._found = Found()
        self._known: dict[tuple[str, str | None], tuple[float, ModelFacts]] = {}  # and when it was learnt
        self._generation = 0
        self._pending = 0  # models that are looked at now, or next

    def moves(self) -> bool:
        """Whether the view changes soon by itself."""
        with self._lock:
            return self._pending > 0 or self._found.phase == "searching"

    def view(self) -> Found:
        """How far it is."""
        with self._lock:
            return self._found

    def search(self, text: str) -> None:
        """Begin: words, a repo id, or the address of a model's page. Returns at once.

        Raises:
            DownloadError: an address that is no model's.
        """
        text = whole_unicode(text).strip()
        repo = find_repo(text)
        with self._lock:
            self._generation += 1
            revision = self._found.revision + 1
            self._found = Found(query=text, phase="searching", revision=revision)
            args = (self._generation, text, repo)
        threading.Thread(target=self._search, args=args, name="hub-search", daemon=True).start()

    def look_again(self, repo_id: str) -> None:
        """Ask about one model once more, as after a token was given."""
        with self._lock:
            facts = {name: known for name, known in self._found.facts.items() if name != repo_id}
            self._found = replace(self._found, facts=facts, revision=self._found.revision + 1)
            generation = self._generation
            self._pending += 1
            named = find_repo(self._found.query)
        revision = named[1] if named is not None and named[0] == repo_id else None
        threading.Thread(target=self._look, args=(generation, repo_id, revision), daemon=True).start()

    def facts_of(self, repo_id: str) -> ModelFacts | None:
        """What the search learnt of a repo."""
        found = self.view().facts.get(repo_id)
        return found if isinstance(found, ModelFacts) else None

    def _search(self, generation: int, query: str, repo: tuple[str, str | None] | None) -> None:
        try:
            if repo is None:
                hits = tuple(SearchHit(**values) for values in self._call("search", {"query": query}))
            else:
                hits = (SearchHit(repo[0], "", None, "", False, 0, ""),)
        except LocalMoeError as error:
            failure = Failure(type(error).__name__, str(error))
            self._update(generation, phase="failed", failure=failure)
            return
        revision = None if repo is None else repo[1]
        candidates = [hit.repo_id for hit in hits if not hit.refusal][:MAX_LOOKED_AT]
        with self._lock:
            self._pending += len(candidates)
        self._update(generation, phase="done", hits=hits)
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="hub-look") as pool:
            list(pool.map(lambda repo_id: self._look(generation, repo_id, revision), candidates))

    def _look(self, generation: int, repo_id: str, revision: str | None) -> None:
        try:
            self._learn(generation, repo_id, revision)
        finally:
            with self._lock:
                self._pending -= 1

    def _learn(self, generation: int, repo_id: str, revision: str | None) -> None:
        with self._lock:
            if generation != self._generation:
                return  # another search began
            learnt, known = self._known.get((repo_id, revision), (0.0, None))
            if self._clock() - learnt > KNOWN_FOR_S:
                known = None
        entry: ModelFacts | Failure
        try:
            given = {"repo_id": repo_id, "revision": revision}
            entry = known or ModelFacts.from_dict(self._call("repo_facts", given))
        except LocalMoeError as error:
            entry = Failure(type(error).__name__, str(error))
        with self._lock:
            if isinstance(entry, ModelFacts) and entry is not known:
                self._known[repo_id, revision] = self._clock(), entry
            if generation == self._generation:
                facts = {**self._found.facts, repo_id: entry}
                self._found = replace(self._found, facts=facts, revision=self._found.revision + 1)

    def _update(self, generation: int, **changes: Any) -> None:
        with self._lock:
            if generation == self._generation:
                self._found = replace(self._found, **changes, revision=self._found.revision + 1)
