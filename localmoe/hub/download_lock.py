"""Lets one process at a time work on a download. Knows nothing of what is downloaded.

Each contender puts down a file of its own, named by process id and start time, and then looks whether there
is another one of a process that runs. A holder's file stays, so whoever comes later sees it; two that come at
once both withdraw and try again after waits of random length. Files of killed processes are removed.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localmoe.core.errors import DownloadError
from localmoe.hub.process_marks import is_running, own_mark

_TRIES = 8
_LONGEST_WAIT_S = 0.08


@contextmanager
def download_lock(folder: Path, name: str, what: str) -> Iterator[None]:
    """Hold the lock `name` of `folder`, which exists. `what`: the download, for the error's sentence.

    Raises:
        DownloadError: a process that runs holds it.
    """
    own = folder / f".{name}.lock-{own_mark()}"
    holder: int | None = None
    for _ in range(_TRIES):
        try:
            own.touch(exist_ok=False)
        except FileExistsError:
            raise DownloadError(
                f"{what} is being downloaded already, in this process: wait for it."
            ) from None
        holder = _other_holder(folder, name, own)
        if holder is None:
            break
        own.unlink(missing_ok=True)
        time.sleep(random.uniform(0.2, 1.0) * _LONGEST_WAIT_S)
    if holder is not None:
        raise DownloadError(
            f"{what} is being downloaded already, by process {holder}: wait for it, or end it first."
        )
    try:
        yield
    finally:
        own.unlink(missing_ok=True)


def _other_holder(folder: Path, name: str, own: Path) -> int | None:
    """The id of another process that runs and has its file there."""
    # names that differ in case alone are one folder on some disks
    pattern = re.compile(rf"\.{re.escape(name)}\.lock-(\d+)-(\d+)", re.IGNORECASE)
    found: int | None = None
    for path in list(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or path.name == own.name:
            continue
        if is_running(int(match[1]), int(match[2])):
            found = int(match[1])
        else:
            path.unlink(missing_ok=True)
    return found
