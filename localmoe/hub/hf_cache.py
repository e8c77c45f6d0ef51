"""Reads the Hugging Face cache: which repos it holds, and the revision to use. Downloads nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from localmoe.core.errors import LocalMoeError, ModelNotFoundError
from localmoe.hub.model_folder import FolderFacts, read_folder
from localmoe.hub.names import is_repo_id

_PREFIX = "models--"


def cache_folder() -> Path:
    """HF_HUB_CACHE, HF_HOME/hub or the default place, as huggingface_hub finds it; need not exist."""
    env = os.environ
    explicit = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    if explicit is None:
        base = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        explicit = os.path.join(base, "hub")
    return Path(os.path.expandvars(os.path.expanduser(explicit))).absolute()


def repo_folder(repo_id: str) -> Path:
    """Where the cache keeps a repo; need not exist."""
    return cache_folder() / (_PREFIX + repo_id.replace("/", "--"))


def cached_repos() -> Iterator[str]:
    """Repo ids of all models in the cache, complete or not, in name order."""
    for name in folder_names(cache_folder()):
        repo_id = name.removeprefix(_PREFIX).replace("--", "/")
        if name.startswith(_PREFIX) and is_repo_id(repo_id):
            yield repo_id


def complete_snapshot(repo_id: str) -> tuple[Path, FolderFacts]:
    """The snapshot to use: the one that "main" stands for, or else the newest that is complete.

    Raises:
        ModelNotFoundError: the cache has nothing of this repo.
        LocalMoeError: it has no complete snapshot; the error is that of the preferred one.
    """
    first_error: LocalMoeError | None = None
    for snapshot in snapshots(repo_folder(repo_id)):
        try:
            return snapshot, read_folder(snapshot)
        except LocalMoeError as error:
            first_error = first_error or error
    raise first_error or ModelNotFoundError(f"Model {repo_id} is not in the Hugging Face cache.")


def snapshots(repo: Path) -> list[Path]:
    """Snapshot folders, the preferred one first."""
    main = _read_ref(repo / "refs" / "main")
    folders = [repo / "snapshots" / name for name in folder_names(repo / "snapshots")]
    return sorted(folders, key=lambda folder: (folder.name == main, _modified(folder)), reverse=True)


def _read_ref(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(200).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _modified(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def folder_names(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted; empty if it is missing or may not be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
