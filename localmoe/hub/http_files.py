"""Brings one file over HTTP, going on at the byte where it stopped. Does not choose files and does not know
the folder that they are for."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from localmoe.core.errors import DownloadError, HubUnreachableError
from localmoe.hub.http_errors import (
    NETWORK_ERRORS,
    RemoteChangedError,
    TransientError,
    check_link,
    check_status,
    sorted_error,
)
from localmoe.hub.part_file import PartFile
from localmoe.hub.remote_files import RemoteFile
from localmoe.hub.transfer_meter import TransferMeter

T = TypeVar("T")
MAX_WRONG = 3  # times that a file is fetched from its first byte before its checksum is given up on
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to bear with a network.

    Attributes:
        attempts: tries in a row that brought nothing, before giving up.
        first_wait_s: before the second try; it doubles with each further one, up to longest_wait_s.
        stall_s: silence after which a connection counts as lost.
    """

    attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    stall_s: float = 30.0

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """Seconds before the next try: what the server asked for, or exponential with jitter, so that files
        that failed together do not come back together."""
        if asked_s is not None:
            return min(asked_s, self.longest_wait_s)
        longest = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failures - 1))
        return longest * random.uniform(0.5, 1.0)


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    patience: Patience,
    what: str,
    *,
    note: Callable[[str], None],
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """The result of `attempt`, tried again after each TransientError; tries that brought `progress` further
    than ever before do not count.

    Raises:
        HubUnreachableError: too many tries in a row failed.
    """
    failures, furthest = 0, progress()
    while True:
        try:
            return await attempt()
        except TransientError as error:
            failures = 1 if progress() > furthest else failures + 1
            furthest = max(furthest, progress())
            if failures >= patience.attempts:
                raise HubUnreachableError(
                    f"{what} failed {failures} times in a row ({error}): check the connection, and try again "
                    "later; what has arrived is kept."
                ) from error
            wait_s = patience.wait_s(failures, error.wait_s)
            note(f"{error}, trying again in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
            note("")


@dataclass(frozen=True, slots=True)
class HttpSource:
    """What all files of one download share.

    Attributes:
        client: an asynchronous HTTP client of huggingface_hub. It follows redirects, without the
            authorization header where they lead to another host.
        headers: of every request.
        pool: for what blocks on the disk.
    """

    repo_id: str
    client: Any  # httpx.AsyncClient or its successor's
    headers: Mapping[str, str]
    patience: Patience
    meter: TransferMeter
    pool: Executor

    async def fetch(self, part: PartFile, url: str) -> None:
        """Complete `part`, check it, and put it on the disk. Cancelling keeps what has arrived.

        Raises:
            DownloadError: the network or the checksum keeps failing, or access is refused.
            RemoteChangedError: the Hub serves another file than the plan says.
            OSError: the disk refuses.
        """
        loop, file = asyncio.get_running_loop(), part.file
        try:
            if part.path.exists():
                self.meter.note(file.name, f"checking what is here of {file.name}")
                await loop.run_in_executor(self.pool, part.hash_present)
                self.meter.note(file.name, "")
            for _ in range(MAX_WRONG):
                self.meter.hold(file.name, part.size)
                await self._complete(part, url)
                if part.is_right:
                    await loop.run_in_executor(self.pool, part.sync)
                    return
                part.restart()
                self.meter.hold(file.name, 0)
                self.meter.note(file.name, f"{file.name} had a wrong checksum, fetching it again")
        finally:
            part.stop()
            self.meter.note(file.name, "")
        raise DownloadError(
            f"{file.name} of {self.repo_id} arrived {MAX_WRONG} times with a wrong checksum and was thrown "
            "away: a proxy or the disk may damage it; try again later or over another network."
        )

    async def _complete(self, part: PartFile, url: str) -> None:
        async def attempt() -> None:
            if part.size < part.file.num_bytes:
                await self._receive(part, url)

        await retrying(
            attempt,
            self.patience,
            f"Downloading {part.file.name} of {self.repo_id}",
            note=lambda text: self.meter.note(part.file.name, text),
            progress=lambda: part.size,
        )

    async def _receive(self, part: PartFile, url: str) -> None:
        """One request; raises TransientError if it ends before the file does."""
        headers = dict(self.headers)
        if part.size:
            headers["Range"] = f"bytes={part.size}-"
        stall_s = self.patience.stall_s
        try:
            async with self.client.stream(
                "GET", url, headers=headers, timeout=stall_s, follow_redirects=True
            ) as response:
                known = await self._check_answer(response, part)
                async for chunk in response.aiter_raw():
                    self._take(part, chunk[known:])
                    known = max(0, known - len(chunk))
                    if part.size > part.file.num_bytes:
                        return  # its checksum will be wrong
        except NETWORK_ERRORS as error:
            raise sorted_error(self.repo_id, error) from error
        if part.size < part.file.num_bytes:
            raise TransientError("connection lost (the answer was too short)")

    def _take(self, part: PartFile, chunk: bytes) -> None:
        part.append(chunk)
        self.meter.receive(len(chunk))
        self.meter.hold(part.file.name, min(part.size, part.file.num_bytes))

    async def _check_answer(self, response: Any, part: PartFile) -> int:
        """See that what follows is the rest of the file, or the whole of it; how many of its bytes are in
        `part` already."""
        status, file = int(response.status_code), part.file
        if status == 416:
            self._start_anew(part)
            raise TransientError("the server refused to go on")
        if status >= 400:
            check_link(response)
            await response.aread()
            check_status(response)
        first = response.history[0] if response.history else response
        tag = str(first.headers.get("x-linked-etag") or first.headers.get("etag") or "")
        if _names_another(tag, file):
            raise RemoteChangedError(f"{file.name} has changed")
        if status == 206:
            self._check_range(str(response.headers.get("content-range", "")), part)
        elif status == 200:
            length = str(response.headers.get("content-length", file.num_bytes))
            if length != str(file.num_bytes):
                raise RemoteChangedError(f"{file.name} has another size")
            return part.size  # this server knows no ranges, or it is a network's own page: nothing is lost
        else:
            raise TransientError(f"the server answered {status}")
        return 0

    def _check_range(self, text: str, part: PartFile) -> None:
        match = _CONTENT_RANGE.fullmatch(text)
        if match is None or int(match[1]) != part.size:
            self._start_anew(part)
            raise TransientError("the server sent another part than was asked for")
        if match[3] not in ("*", str(part.file.num_bytes)):
            raise RemoteChangedError(f"{part.file.name} has another size")

    def _start_anew(self, part: PartFile) -> None:
        part.restart()
        self.meter.hold(part.file.name, 0)


def _names_another(tag: str, file: RemoteFile) -> bool:
    """Whether an ETag is a checksum of the file's kind and another one; mirrors may have their own."""
    bare = tag.removeprefix("W/").strip('"').lower()
    return _HEX.fullmatch(bare) is not None and len(bare) == len(file.digest) and bare != file.digest
