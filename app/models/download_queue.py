"""The queue of downloads: one runs at a time, all survive a restart. Brings no byte itself (the Hub's process
does) and does not know what a finished one is for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from app.models.queue_file import Download, QueueFile, Role, State, new_id
from localmoe.core.errors import ConfigError, DownloadCancelledError, LocalMoeError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.hub.downloads import discard_download

_LOG = logging.getLogger(__name__)
SAVE_EVERY_S = 2.0
SHOW_EVERY_S = 0.3  # the page need not hear of every report
_OPEN_STATES = ("queued", "running", "paused", "failed")


class Puller(Protocol):
    """`HubClient.call`."""

    def __call__(
        self, action: str, given: dict[str, Any], *, progress: ProgressCallback, cancel: threading.Event
    ) -> Any: ...


class DownloadQueue:
    """Its lock is never held while a download runs or a callback is called."""

    def __init__(self, path: Path, pull: Puller, on_done: Callable[[Download], None]) -> None:
        """on_done: called in the queue's thread with each download that has arrived."""
        self._file = QueueFile(path)
        self._pull, self._on_done = pull, on_done
        self._changed = threading.Condition()
        self._downloads = self._file.read()
        self._cancel: threading.Event | None = None  # of the one that runs
        self._closed = self._handing_over = False
        self._saved = self._shown = 0.0
        self._thread: threading.Thread | None = None
        self.revision = 0
        self.save_error = ""  # a sentence while the disk refuses the queue's file

    @property
    def report(self) -> str:
        """A sentence if the queue could not be read."""
        return self._file.report

    def start(self) -> None:
        """Go on where the last run of the app ended: what ran runs, what was paused or failed waits for the
        user, and what was cancelled is cleared away."""
        with self._changed:
            for download in self._downloads:
                if download.state == "running":
                    self._replace(download.id, state="queued")
            self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
            self._thread.start()

    def view(self) -> tuple[Download, ...]:
        """All entries, in order."""
        with self._changed:
            return tuple(self._downloads)

    def moves(self) -> bool:
        """Whether something runs or is about to."""
        with self._changed:
            begun = any(one.state in ("queued", "running", "cancelled") for one in self._downloads)
            return begun or self._handing_over

    def find(self, repo_id: str) -> Download | None:
        """The open entry of a repo."""
        found = [one for one in self.view() if one.repo_id == repo_id and one.state in _OPEN_STATES]
        return found[0] if found else None

    def add(
        self, repo_id: str, revision: str | None = None, *, role: Role = "model", for_model: str = "",
        then_chat: bool = False, draft: str = "background", from_disk: bool = False,
    ) -> Download:  # fmt: skip
        """Put a repo at the end of the queue; one that is in it goes on, with the new wishes."""
        with self._changed:
            known = next(
                (d for d in self._downloads if d.repo_id == repo_id and d.state in _OPEN_STATES), None
            )
            if known is not None:
                state: State = "running" if known.state == "running" else "queued"
                from_disk = from_disk if then_chat else known.from_disk
                then_chat = then_chat or known.then_chat
                if known.state == "running":
                    revision = None  # what is being brought stays what it is
                return self._replace(
                    known.id, state=state, revision=revision, then_chat=then_chat, draft=draft,
                    from_disk=from_disk, error="", error_kind="",
                )  # fmt: skip
            download = Download(
                new_id(), repo_id, revision, role=role, for_model=for_model, then_chat=then_chat, draft=draft,
                from_disk=from_disk,
            )  # fmt: skip
            self._downloads.append(download)
            self._save()
            return download

    def pause(self, download_id: str) -> None:
        """Keep what has arrived."""
        self._stop(download_id, "paused")

    def resume(self, download_id: str) -> None:
        """Go on with a paused or failed one, after those that wait."""
        with self._changed:
            if self._get(download_id).state in ("paused", "failed"):
                self._replace(download_id, state="queued", error="", error_kind="")

    def cancel(self, download_id: str) -> None:
        """Delete what has arrived; it does not begin again by itself, even if the app is killed now."""
        self._stop(download_id, "cancelled")

    def close(self) -> None:
        """Stop; what runs goes on when the app starts again."""
        with self._changed:
            self._closed = True
            if self._cancel is not None:
                self._cancel.set()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)

    def _stop(self, download_id: str, state: State) -> None:
        with self._changed:
            running = self._get(download_id).state == "running"
            self._replace(download_id, state=state, then_chat=False if state == "cancelled" else None)
            if running and self._cancel is not None:
                self._cancel.set()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (found := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
                assert found is not None
                if found.state == "queued":
                    found = self._replace(found.id, state="running")
                    self._cancel = threading.Event()
            if found.state == "cancelled":
                self._clear(found)
            else:
                self._download(found)

    def _next(self) -> Download | None:
        """Something to do: first what is to be cleared away."""
        for state in ("cancelled", "queued"):
            for download in self._downloads:
                if download.state == state:
                    return download
        return None

    def _clear(self, download: Download) -> None:
        error = ""
        try:
            discard_download(download.repo_id)
        except LocalMoeError as failure:
            error = str(failure)
        with self._changed:
            if error:  # shown, and tried again when the user says so
                self._replace(download.id, state="failed", error=error, error_kind="DownloadError")
            else:
                self._downloads = [one for one in self._downloads if one.id != download.id]
                self._save()

    def _download(self, download: Download) -> None:
        cancel = self._cancel
        assert cancel is not None

        def report(progress: Progress) -> None:
            self._note(download.id, progress)

        given = {
            "repo_id": download.repo_id, "revision": download.revision, "draft": download.role == "draft",
        }  # fmt: skip
        _LOG.info("downloading %s", download.repo_id)
        try:
            self._pull("pull", given, progress=report, cancel=cancel)
        except DownloadCancelledError:
            _LOG.info("the download of %s was stopped", download.repo_id)
            self._end(download.id, None)
        except LocalMoeError as error:
            _LOG.error("the download of %s failed: %s", download.repo_id, error)
            self._end(download.id, error)
        else:
            _LOG.info("%s is downloaded", download.repo_id)
            self._finish(download.id)

    def _finish(self, download_id: str) -> None:
        with self._changed:
            found = self._get(download_id)
            cancelled = found.state == "cancelled"  # too late to stop it: the model is here, and listed
            found = self._replace(download_id, state="done", done_bytes=found.total_bytes)
            self._downloads = [one for one in self._downloads if one.id != download_id]
            self._handing_over = True
            self._save()
        try:
            self._on_done(replace(found, then_chat=found.then_chat and not cancelled))
        finally:
            with self._changed:
                self._handing_over = False

    def _end(self, download_id: str, error: LocalMoeError | None) -> None:
        """It stopped: because the user or the app's end wanted that, or because it failed."""
        with self._changed:
            if self._closed or self._get(download_id).state != "running":
                return
            if error is None:
                self._replace(download_id, state="paused")
            else:
                self._replace(download_id, state="failed", error=str(error), error_kind=type(error).__name__)

    def _note(self, download_id: str, progress: Progress) -> None:
        now = time.monotonic()
        with self._changed:
            if now - self._shown < SHOW_EVERY_S and progress.done != progress.total:
                return
            self._shown = now
            found = self._get(download_id)
            total = progress.total or found.total_bytes
            done = progress.done if progress.total else found.done_bytes
            self._replace(
                download_id, save=now - self._saved > SAVE_EVERY_S, done_bytes=done, total_bytes=total,
                rate=progress.detail, seconds_left=progress.seconds_left,
            )  # fmt: skip

    # --- under the lock -------------------------------------------------------------------------------------

    def _get(self, download_id: str) -> Download:
        for download in self._downloads:
            if download.id == download_id:
                return download
        raise ConfigError("This download is no longer in the queue.")

    def _replace(self, download_id: str, *, save: bool = True, **changes: Any) -> Download:
        """`changes` that are None where the field is no number are left out."""
        found = self._get(download_id)
        changes = {
            name: value for name, value in changes.items() if value is not None or name == "seconds_left"
        }
        if changes.get("state") not in (None, "running"):
            changes = {"rate": "", "seconds_left": None, **changes}
        changed = replace(found, **changes)
        self._downloads = [changed if one.id == download_id else one for one in self._downloads]
        self.revision += 1
        if save:
            self._save()
        return changed

    def _save(self) -> None:
        self.revision += 1
        self._saved = time.monotonic()
        try:
            self._file.write(self._downloads)
            self.save_error = ""
        except OSError as error:  # the queue goes on in memory
            reason = error.strerror or type(error).__name__
            self.save_error = f"The download queue cannot be kept ({reason}): it would be lost by a restart."
        self._changed.notify_all()
