"""The download queue with a stand-in for the network: states, order, and what survives a restart."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from app_process import wait_for

from app.models.download_queue import DownloadQueue
from app.models.queue_file import SCHEMA, Download, QueueFile
from localmoe.core.errors import (
    ConfigError,
    DownloadCancelledError,
    GatedModelError,
    HubUnreachableError,
    LocalMoeError,
)
from localmoe.core.types import Progress, ProgressCallback
from localmoe.hub.names import safe_name


class Network:
    """Brings a hundred bytes of each repo, ten at a time, while it is open; keeps what has arrived."""

    def __init__(self, home: Path) -> None:
        self.home, self.open, self.errors = home, threading.Event(), {}  # type: ignore[var-annotated]
        self.arrived: dict[str, int] = {}
        self.order: list[str] = []
        self.active = self.most_active = 0

    def __call__(
        self, action: str, given: dict[str, Any], *, progress: ProgressCallback, cancel: threading.Event
    ) -> str:
        assert action == "pull"
        repo_id = given["repo_id"]
        self.order.append(repo_id)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return self._bring(repo_id, progress, cancel)
        finally:
            self.active -= 1

    def _bring(self, repo_id: str, progress: ProgressCallback, cancel: threading.Event) -> str:
        folder = self.home / "models" / f".{safe_name(repo_id)}.download"
        folder.mkdir(parents=True, exist_ok=True)
        while self.arrived.get(repo_id, 0) < 100:
            if repo_id in self.errors:
                raise self.errors.pop(repo_id)
            if cancel.is_set():
                raise DownloadCancelledError("The download was stopped.")
            if not self.open.wait(0.005):
                progress(Progress("download", self.arrived.get(repo_id, 0), 100, "bytes", None, "0.0 B/s"))
                continue
            time.sleep(0.01)
            self.arrived[repo_id] = self.arrived.get(repo_id, 0) + 10
            (folder / "part").write_bytes(b"x" * self.arrived[repo_id])
            progress(Progress("download", self.arrived[repo_id], 100, "bytes", 1.0, "5.0 MB/s"))
        return str(folder)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    return Network(tmp_path)


@pytest.fixture
def done() -> list[Download]:
    return []


@pytest.fixture
def queue(tmp_path: Path, network: Network, done: list[Download]) -> Iterator[DownloadQueue]:
    made = DownloadQueue(tmp_path / "downloads.json", network, done.append)
    made.start()
    yield made
    made.close()


def state(queue: DownloadQueue, repo_id: str) -> str:
    found = [one.state for one in queue.view() if one.repo_id == repo_id]
    return found[0] if found else ""


def folder_of(network: Network, repo_id: str) -> Path:
    return network.home / "models" / f".{safe_name(repo_id)}.download"


def test_one_at_a_time_in_order_and_each_is_told_of_once(
    queue: DownloadQueue, network: Network, done: list[Download]
) -> None:
    first = queue.add("a/one", "v1", then_chat=True, draft="instant")
    queue.add("a/two")
    assert queue.add("a/one").id == first.id  # it is in the queue already
    wait_for(lambda: state(queue, "a/one") == "running")
    assert state(queue, "a/two") == "queued"
    network.open.set()
    wait_for(lambda: len(done) == 2)
    assert [one.repo_id for one in done] == network.order == ["a/one", "a/two"] and network.most_active == 1
    assert (done[0].then_chat, done[0].draft, done[0].revision) == (True, "background", "v1")
    assert queue.view() == ()


def test_what_does_not_run_takes_the_revision_that_is_asked_for_last(
    queue: DownloadQueue, network: Network, done: list[Download]
) -> None:
    first, second = queue.add("a/one", "v1"), queue.add("a/two", "v1")
    wait_for(lambda: state(queue, "a/one") == "running")
    queue.pause(second.id)
    assert queue.add("a/one", "v2").revision == "v1"  # it is being brought
    again = queue.add("a/two", "v2")
    assert (again.id, again.revision, again.state) == (second.id, "v2", "queued")
    assert queue.add("a/two").revision == "v2" and first.id != second.id
    network.open.set()
    wait_for(lambda: len(done) == 2)


def test_a_pause_keeps_a_cancel_deletes_and_the_next_goes_on(
    queue: DownloadQueue, network: Network, done: list[Download]
) -> None:
    one, two = queue.add("a/one"), queue.add("a/two")
    network.open.set()
    wait_for(lambda: network.arrived.get("a/one", 0) > 0)
    network.open.clear()
    queue.pause(one.id)
    wait_for(lambda: state(queue, "a/two") == "running")
    kept = (folder_of(network, "a/one") / "part").stat().st_size
    assert state(queue, "a/one") == "paused" and kept == network.arrived["a/one"]
    queue.cancel(two.id)
    wait_for(lambda: state(queue, "a/two") == "")
    assert not folder_of(network, "a/two").exists()
    queue.resume(one.id)
    wait_for(lambda: state(queue, "a/one") == "running")
    assert network.order == ["a/one", "a/two", "a/one"]
    queue.pause(one.id)
    queue.cancel(one.id)  # before it has stopped
    wait_for(lambda: queue.view() == ())
    assert done == [] and not folder_of(network, "a/one").exists()
    with pytest.raises(ConfigError, match="no longer"):
        queue.pause(one.id)


def test_a_failure_says_its_kind_and_is_tried_again(
    queue: DownloadQueue, network: Network, done: list[Download]
) -> None:
    errors: list[LocalMoeError] = [GatedModelError("a/one is gated."), HubUnreachableError("No network.")]
    network.errors["a/one"] = errors[0]
    one = queue.add("a/one")
    wait_for(lambda: state(queue, "a/one") == "failed")
    assert [(d.error_kind, d.error) for d in queue.view()] == [("GatedModelError", "a/one is gated.")]
    network.open.set()
    queue.resume(one.id)
    wait_for(lambda: len(done) == 1)
    assert (done[0].error_kind, done[0].error) == ("", "")


def test_a_restart_goes_on_with_what_ran_and_nothing_else(
    tmp_path: Path, queue: DownloadQueue, network: Network, done: list[Download]
) -> None:
    for name in ("a/runs", "a/waits", "a/paused", "a/failed"):
        queue.add(name, then_chat=True)
    queue.pause(queue.view()[2].id)
    queue.pause(queue.view()[3].id)
    wait_for(lambda: state(queue, "a/runs") == "running")
    queue.close()
    kept = json.loads((tmp_path / "downloads.json").read_text())
    assert [one["state"] for one in kept["downloads"]] == ["running", "queued", "paused", "paused"]
    # as a kill leaves it between the click on Cancel and the deletion
    kept["downloads"][3]["state"] = "cancelled"
    folder_of(network, "a/failed").mkdir(parents=True)
    (tmp_path / "downloads.json").write_text(json.dumps(kept))
    again = DownloadQueue(tmp_path / "downloads.json", network, done.append)
    again.start()
    network.open.set()
    wait_for(lambda: len(done) == 2)
    assert [one.repo_id for one in done] == ["a/runs", "a/waits"] and done[0].then_chat
    assert [(one.repo_id, one.state) for one in again.view()] == [("a/paused", "paused")]
    assert not folder_of(network, "a/failed").exists() and "a/failed" not in network.order
    again.close()


def test_a_newer_version_s_queue_is_read_and_what_it_says_besides_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "downloads.json"
    entry = {"id": "a1", "repo_id": "a/b", "mirror": "m"}
    path.write_text(json.dumps({"schema": SCHEMA + 1, "downloads": [entry], "limit": 3}))
    file = QueueFile(path)
    found = file.read()
    assert [(one.id, one.repo_id) for one in found] == [("a1", "a/b")] and not file.report
    file.write([*found, Download("b2", "c/d")])
    data = json.loads(path.read_text())
    assert (data["schema"], data["limit"]) == (SCHEMA + 1, 3)
    assert [one.get("mirror") for one in data["downloads"]] == ["m", None]


DAMAGED = ["", "[]", "{", '{"downloads": 3}', '{"downloads": [{"id": "x"}]}', "[" * 100_000]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_set_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "downloads.json"
    path.write_text(text)
    file = QueueFile(path)
    assert file.read() == [] and "kept as" in file.report and not path.exists()
    again = QueueFile(path)
    assert again.read() == [] and again.report == file.report, "it may not have been said before a kill"
    assert len(list(tmp_path.glob("*.damaged"))) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"repo_id": "../x"},
        {"state": "odd"},
        {"id": "<b>"},
        {"done_bytes": "1"},
        {"revision": 4},
        {"x": 1},
        {"revision": "half \ud800"},
        {"then_chat": "yes"},
        {"error_kind": ["x"]},
    ],
)
def test_an_entry_that_is_none_is_not_believed(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "downloads.json"
    good = Download("ab12", "a/b", draft="instant", done_bytes=5, total_bytes=9, state="paused")
    file = QueueFile(path)
    file.write([good, replace(good, id="cd", state="done")])
    assert file.read() == [good]
    values = {**asdict(good), **change}
    del values["rate"], values["seconds_left"]
    path.write_text(json.dumps({"schema": 1, "downloads": [values]}))
    assert file.read() == []


def test_a_disk_that_refuses_the_file_does_not_stop_the_downloads(
    tmp_path: Path,
    queue: DownloadQueue,
    network: Network,
    done: list[Download],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: QueueFile, downloads: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(QueueFile, "write", refuse)
        queue.add("a/one")
        assert "No space left" in queue.save_error
        network.open.set()
        wait_for(lambda: len(done) == 1)
    queue.add("a/two")
    assert queue.save_error == ""
