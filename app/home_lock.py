"""Lets one app at a time use a home: its files are rewritten whole from memory, so that a second one would
undo what the first one saved. The lock is of the downloads' kind (a file named by its process, which a killed
one does not hold); launch.py's own, which launch.py holds, only orders starts. Needs no Gradio."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from app.address import running_page
from localmoe.core.errors import DownloadError, LocalMoeError
from localmoe.hub.download_lock import download_lock


class HomeInUseError(LocalMoeError):
    """Another app has this home."""


@contextlib.contextmanager
def home_lock(home: Path) -> Iterator[None]:
    """Hold the home, which is made if it is not there.

    Raises:
        HomeInUseError: an app that runs, or is just starting, holds it.
        OSError: the folder cannot be used.
    """
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(download_lock(home, "app", "localmoe"))
        except DownloadError:
            raise HomeInUseError(in_use(home)) from None
        yield


def in_use(home: Path) -> str:
    """The sentence that refuses a second app."""
    page = running_page(home)
    where, that = (f"running at {page}", "use that page") if page else ("starting", "wait for its page")
    return (
        f"localmoe is already {where} with the chats and settings in {home}: {that}, end it first, or set "
        "LOCALMOE_HOME to another folder."
    )
