"""Unfinished downloads: listed with how far they are, deleted with what they free."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_home import NEEDED, QUICK, REPO, contents, hub_and_home, needed_bytes, pull, small_model
from support.hub_server import Fault, HubServer

from localmoe.cli.main import main
from localmoe.core.errors import DownloadCancelledError, DownloadError, ModelNotFoundError
from localmoe.core.types import Progress
from localmoe.hub.catalogue import remove_model, resolve_model
from localmoe.hub.downloads import discard_download, download_model
from localmoe.hub.unfinished import PENDING_FILE, Pending, UnfinishedDownload, list_unfinished


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        yield server


def cut_short(hub: HubServer, revision: str | None = None) -> None:
    """A pull that is cancelled in the middle."""
    cancel = threading.Event()

    def report(progress: Progress) -> None:
        if progress.done > 200_000:
            cancel.set()

    hub.rate = 1e6
    with pytest.raises(DownloadCancelledError):
        download_model(REPO, revision, progress=report, cancel=cancel, options=QUICK)
    hub.rate = None


def test_it_is_listed_gone_on_with_and_deleted(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_model(1 << 17)
    commit = hub.commit(REPO, files)
    cut_short(hub, commit)
    (found,) = list_unfinished(tmp_path / "models")
    assert (found.repo_id, found.revision, found.total_bytes) == (REPO, commit, needed_bytes(files))
    assert 200_000 < found.held_bytes < needed_bytes(files)
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    entry = next(model for model in listed if model["source"] == "unfinished")
    assert (entry["name"], entry["bytes"], entry["total_bytes"]) == (
        REPO,
        found.held_bytes,
        needed_bytes(files),
    )
    assert entry["revision"] == commit
    assert main(["models"]) == 0
    assert "Unfinished" in (shown := capsys.readouterr().out) and REPO in shown and commit in shown
    freed = remove_model(REPO)
    assert freed == found.held_bytes and list_unfinished(tmp_path / "models") == []
    with pytest.raises(ModelNotFoundError):
        remove_model(REPO)


def test_the_published_model_has_no_trace_of_it_and_both_are_removed_together(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.commit(REPO, small_model(1 << 17))
    cut_short(hub)
    folder = pull()
    assert not (folder / PENDING_FILE).exists() and list_unfinished(tmp_path / "models") == []
    hub.commit(REPO, small_model((1 << 17) + 8))  # an update that is cut short leaves the old model in place
    cut_short(hub)
    assert folder.is_dir() and len(list_unfinished(tmp_path / "models")) == 1
    remove_model(REPO)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_update_that_was_killed_between_its_two_renames_costs_neither_version(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    old, new = small_model(), small_model(1008)
    hub.commit(REPO, old)
    folder = pull()
    hub.commit(REPO, new)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.endswith(".download"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        pull()
    assert not folder.exists()
    if goes_on:
        hub.requests.clear()
        pull()
        assert not hub.bodies("safetensors")
    else:
        assert discard_download(REPO) > 0
    assert resolve_model(REPO).folder == folder
    assert contents(folder) == {name: (new if goes_on else old)[name] for name in NEEDED}
    assert list((tmp_path / "models").iterdir()) == [folder]


def test_the_old_version_that_an_update_left_when_it_was_killed_goes_with_the_next_pull(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.commit(REPO, small_model())
    folder = pull()
    for done in (pull, lambda: remove_model(REPO)):
        (tmp_path / "models" / ".org--moe.replaced").mkdir()
        done()
        assert list((tmp_path / "models").iterdir()) == [folder] * folder.exists()


def test_one_that_runs_is_not_deleted(hub: HubServer, tmp_path: Path) -> None:
    hub.commit(REPO, small_model(1 << 17))
    hub.rate = 2e5
    cancel = threading.Event()
    began = threading.Event()

    def download() -> None:
        with pytest.raises(DownloadCancelledError):
            download_model(
                REPO, progress=lambda p: began.set() if p.done else None, cancel=cancel, options=QUICK
            )

    thread = threading.Thread(target=download)
    thread.start()
    assert began.wait(10)
    with pytest.raises(DownloadError, match="already"):
        remove_model(REPO)
    cancel.set()
    thread.join()
    assert list_unfinished(tmp_path / "models")[0].held_bytes > 0


def test_folders_of_older_versions_and_strange_ones(tmp_path: Path) -> None:
    for name in (".a--b.download", ".a--c.download", ".odd name!.download", "a--d", ".a--e.replaced", ".x"):
        (tmp_path / name).mkdir()
    (tmp_path / ".a--b.download" / "w.part").write_bytes(b"1234")
    (tmp_path / ".a--c.download" / PENDING_FILE).write_text('{"repo_id": "../evil", "revision": 3}')
    found = list_unfinished(tmp_path)
    assert found[0] == UnfinishedDownload("a/b", None, tmp_path / ".a--b.download", 4, None)
    assert [one.repo_id for one in found] == ["a/b", "a/c"]
    for damaged in ("[" * 100_000, '{"repo_id": "a/c", "revision": null, "total_bytes": Infinity}'):
        (tmp_path / ".a--c.download" / PENDING_FILE).write_text(damaged)
        assert list_unfinished(tmp_path)[1].total_bytes is None
    Pending("other/repo", None, 5).write(tmp_path / ".a--c.download")
    assert [one.repo_id for one in list_unfinished(tmp_path)] == ["a/b"]  # names another repo than its folder
    assert list_unfinished(tmp_path / "none") == []


def test_a_hub_that_breaks_off_leaves_what_arrived(hub: HubServer, tmp_path: Path) -> None:
    files = small_model(1 << 15)
    hub.commit(REPO, files)
    hub.fail("model-00001-of-00002.safetensors", *[Fault(status=503)] * 9)
    with pytest.raises(DownloadError, match="what has arrived is kept"):
        pull()
    assert list_unfinished(tmp_path / "models")[0].held_bytes > len(files["config.json"])
