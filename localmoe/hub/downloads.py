"""Downloads a model from the Hub into localmoe's models folder: plan, fetch several files at a time, publish.
Does not decide which models the engine supports; its caller's check does.

Killed, cancelled or failed, what has arrived stays, and the next call goes on from there: pausing is
cancelling.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from localmoe.core.errors import DownloadCancelledError, DownloadError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.hub.background import BackgroundPool
from localmoe.hub.download_folder import DownloadFolder, disk_errors
from localmoe.hub.download_lock import download_lock
from localmoe.hub.download_plan import check_is_moe, choose_files, needs_index
from localmoe.hub.http_errors import RemoteChangedError
from localmoe.hub.http_files import HttpSource, Patience, retrying
from localmoe.hub.http_sessions import hub_async_session
from localmoe.hub.names import is_repo_id
from localmoe.hub.part_file import PartFile
from localmoe.hub.remote_files import RemoteFile, RemoteSnapshot
from localmoe.hub.remote_repo import RemoteRepo
from localmoe.hub.safetensors_header import shown
from localmoe.hub.transfer_meter import STAGE, TransferMeter

T = TypeVar("T")
ConfigCheck = Callable[[Mapping[str, Any]], None]
_TICK_S = 0.1  # between looks at `cancel`; each is also a progress report
_MAX_PLANS = 3
MAX_QUESTIONS = 4  # tries of one question to the Hub, as nothing has arrived that would be worth patience


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """How to download. num_parallel: files at a time."""

    num_parallel: int = 4
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Plan:
    """One commit and the files of it that are needed."""

    snapshot: RemoteSnapshot
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files)


def download_model(
    repo_id: str,
    revision: str | None = None,
    *,
    check: ConfigCheck | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    options: DownloadOptions | None = None,
) -> Path:
    """Bring a model to where `resolve_model` finds it; returns its folder. Runs an event loop of its own, so
    it must not be called from one.

    Args:
        check: called with config.json before the first byte lands; raises what refuses the model.

    Raises:
        DownloadError: no such repo, no access, no room, network or disk fail, or another download of it runs
            (core.errors has a class for each of the first four).
        DownloadCancelledError: `cancel` was set. UnsupportedModelError: dense, or no safetensors weights.
    """
    if not is_repo_id(repo_id):
        raise DownloadError(
            f"{shown(repo_id)} is no repo id of the Hub: write owner/name, such as "
            "Qwen/Qwen1.5-MoE-A2.7B-Chat."
        )
    folder = DownloadFolder(repo_id)
    with _locked(folder):
        download = _Download(folder, revision, check, progress, cancel, options or DownloadOptions())
        plan = asyncio.run(download.fetch())
        with disk_errors(folder.home):
            if not folder.is_published(plan.snapshot, plan.files):
                folder.publish(plan.snapshot, plan.files)
    return folder.target


@contextmanager
def _locked(folder: DownloadFolder) -> Iterator[None]:
    """Hold a download's lock, with its folder settled. Errors of the disk are told from those of what runs
    meanwhile, which may be the network's."""
    with ExitStack() as held:
        with disk_errors(folder.home):
            folder.home.mkdir(parents=True, exist_ok=True)
            held.enter_context(download_lock(folder.home, folder.name, folder.repo_id))
            folder.settle()
        yield


def discard_download(repo_id: str) -> int:
    """Remove what an unfinished download left; returns the bytes freed.

    Raises:
        DownloadError: the download still runs, or the disk refuses.
    """
    if not is_repo_id(repo_id):
        return 0
    folder = DownloadFolder(repo_id)
    with disk_errors(folder.home):
        if not folder.is_begun:
            return 0
        with download_lock(folder.home, folder.name, repo_id):
            folder.settle()
            return folder.discard()


@dataclass(slots=True)
class _Download:
    """One call of `download_model`."""

    folder: DownloadFolder
    revision: str | None
    check: ConfigCheck | None
    progress: ProgressCallback | None
    cancel: threading.Event | None
    options: DownloadOptions
    _meter: TransferMeter | None = None
    _waiting: str = ""  # for metadata, after a failure
    _pool: BackgroundPool = field(init=False)

    def __post_init__(self) -> None:
        self._pool = BackgroundPool(2 * self.options.num_parallel, thread_name_prefix="localmoe-download")

    async def fetch(self) -> Plan:
        """Bring every file of the plan, checked, into the folder."""
        asyncio.get_running_loop().set_default_executor(self._pool)  # which asyncio.run shuts down
        return await self._watched(self._fetch())

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, reporting and looking at `cancel` several times a second."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_TICK_S)
                self._report()
                if self.cancel is not None and self.cancel.is_set() and not task.done():
                    raise DownloadCancelledError(
                        f"The download of {self.folder.repo_id} was stopped: pull it again to go on."
                    )
            return task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # the error that matters is on its way already
                await task

    def _report(self) -> None:
        if self.progress is None:
            return
        waiting = Progress(STAGE, 0, 0, "bytes", None, self._waiting or "asking the Hub")
        self.progress(waiting if self._meter is None else self._meter.report())

    async def _fetch(self) -> Plan:
        why: RemoteChangedError | None = None
        for number in range(_MAX_PLANS):
            if number:  # its servers may not agree yet
                await asyncio.sleep(self.options.patience.wait_s(number, None))
            plan = await self._plan()
            if self.folder.is_published(plan.snapshot, plan.files):
                self._start_meter(plan).hold("", plan.num_bytes)
                return plan
            with disk_errors(self.folder.home):
                self.folder.prepare(plan.files, self.revision)
            meter = self._start_meter(plan)
            try:
                await self._fetch_files(plan, meter)
                return plan
            except RemoteChangedError as error:  # plan again; files that did not change are kept
                why = error
        raise DownloadError(
            f"The Hub serves other files of {self.folder.repo_id} than it lists ({str(why).rstrip('.')}, in "
            f"{_MAX_PLANS} tries): try again later, or give another --revision."
        ) from why

    def _start_meter(self, plan: Plan) -> TransferMeter:
        self._meter = TransferMeter(plan.num_bytes)
        return self._meter

    async def _plan(self) -> Plan:
        repo = RemoteRepo(self.folder.repo_id)
        snapshot = await self._ask(lambda: repo.snapshot(self.revision))
        values = await self._ask(lambda: repo.read_config(snapshot))
        check_is_moe(repo.repo_id, values)
        if self.check is not None:
            await asyncio.get_running_loop().run_in_executor(self._pool, self.check, values)
        index = needs_index(snapshot)
        entries = None if index is None else await self._ask(lambda: repo.read_json(index, snapshot.commit))
        return Plan(snapshot, choose_files(snapshot, entries))

    async def _ask(self, question: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()

        async def attempt() -> T:
            return await loop.run_in_executor(self._pool, question)

        def note(text: str) -> None:
            self._waiting = text

        what = f"Asking the Hub about {self.folder.repo_id}"
        patience = self.options.patience
        patience = replace(patience, attempts=min(patience.attempts, MAX_QUESTIONS))
        return await retrying(attempt, patience, what, note=note)

    async def _fetch_files(self, plan: Plan, meter: TransferMeter) -> None:
        home = self.folder.home
        with disk_errors(home):
            held = self.folder.held_bytes(plan.files)
            for name, num_bytes in held.items():
                meter.hold(name, num_bytes)
            self.folder.check_room(plan.num_bytes - sum(held.values()))
        repo = RemoteRepo(self.folder.repo_id)
        missing = iter([file for file in plan.files if not self.folder.whole(file).exists()])
        async with hub_async_session() as client:
            patience = self.options.patience
            source = HttpSource(repo.repo_id, client, repo.headers(), patience, meter, self._pool)

            async def work() -> None:
                for file in missing:  # shared: each worker takes the next one
                    with disk_errors(home):  # the network's own are sorted in there
                        part = PartFile(file, self.folder.part(file))
                        await source.fetch(part, repo.url(file, plan.snapshot.commit))
                        part.path.replace(self.folder.whole(file))

            await _together([work() for _ in range(self.options.num_parallel)])


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
