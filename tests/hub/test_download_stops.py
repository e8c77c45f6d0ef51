"""Downloads that are cancelled, and what keeps two of one repo apart."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_home import NEEDED, QUICK, REPO, contents, hub_and_home, pull, small_model
from support.hub_server import HubServer

from localmoe.core.errors import DownloadCancelledError, DownloadError
from localmoe.core.types import Progress
from localmoe.hub.downloads import discard_download, download_model

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        yield server


def test_cancelling_stops_at_once_keeps_what_is_there_and_the_next_pull_goes_on(
    hub: HubServer, tmp_path: Path
) -> None:
    files = small_model(1 << 19)
    hub.commit(REPO, files)
    hub.rate = 2e6
    cancel, seen = threading.Event(), []

    def report(progress: Progress) -> None:
        seen.append(progress)
        if progress.done > 1_000_000 and not cancel.is_set():
            cancel.set()
            seen.append(time.monotonic())

    with pytest.raises(DownloadCancelledError, match="go on"):
        download_model(REPO, progress=report, cancel=cancel, options=QUICK)
    assert time.monotonic() - next(one for one in seen if isinstance(one, float)) < 0.3
    parts = list((tmp_path / "models" / ".org--moe.download").iterdir())
    kept = sum(
        path.stat().st_size for path in parts if "safetensors." in path.name and "index" not in path.name
    )
    assert kept >= 900_000 and not (tmp_path / "models" / "org--moe").exists()
    speeds = [one for one in seen if isinstance(one, Progress) and one.seconds_left]
    assert speeds[-1].detail.endswith("MB/s") and 0.5 < speeds[-1].seconds_left < 10
    hub.rate, hub.requests[:] = None, []
    assert contents(pull()) == {name: files[name] for name in NEEDED}
    assert (
        sum(one.sent for one in hub.bodies(".safetensors")) == len(files[FIRST]) + len(files[SECOND]) - kept
    )


def test_a_cancel_is_heard_while_the_hub_is_silent(hub: HubServer) -> None:
    hub.commit(REPO, small_model())
    silence, cancel = threading.Event(), threading.Event()
    hub.on_file = lambda name: silence.wait(10) and None
    threading.Timer(0.3, cancel.set).start()
    began = time.monotonic()
    with pytest.raises(DownloadCancelledError):
        download_model(REPO, cancel=cancel, options=QUICK)
    assert 0.3 <= time.monotonic() - began < 0.6
    silence.set()


def test_a_cancel_is_heard_while_a_host_s_name_is_looked_up(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(REPO, small_model())
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("127.0.0.1", "localhost"))
    monkeypatch.setenv("NO_PROXY", "localhost")
    look_up, planned, stuck, answer = (
        socket.getaddrinfo,
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    def slow(*args: Any, **options: Any) -> Any:
        if planned.is_set():
            stuck.set()
            answer.wait(5)
        return look_up(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    hub.on_file = lambda name: planned.set() if "index" in name else None
    stopped: list[float] = []

    def report(_: Progress) -> None:
        if stuck.is_set() and not stopped:
            stopped.append(time.monotonic())
            cancel.set()

    cancel = threading.Event()
    with pytest.raises(DownloadCancelledError):
        download_model(REPO, progress=report, cancel=cancel, options=QUICK)
    assert time.monotonic() - stopped[0] < 0.3
    answer.set()


def test_a_second_download_of_the_repo_is_refused_while_one_runs(hub: HubServer) -> None:
    hub.commit(REPO, small_model(1 << 17))
    hub.rate = 5e5
    cancel, started = threading.Event(), threading.Event()

    def report(progress: Progress) -> None:
        if progress.done > 100_000:
            started.set()

    def first() -> None:
        with pytest.raises(DownloadCancelledError):
            download_model(REPO, progress=report, cancel=cancel, options=QUICK)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert started.wait(5)
        for act in (pull, lambda: discard_download(REPO)):
            with pytest.raises(DownloadError, match="being downloaded already"):
                act()
    finally:
        cancel.set()
        thread.join()
    assert discard_download(REPO) > 0 and discard_download(REPO) == 0
