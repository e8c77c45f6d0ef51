"""Removes a model, and what was made of it, from disk. Touches nothing outside localmoe's home and the
Hugging Face cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from localmoe.core.errors import ConfigError, LocalMoeError, ModelNotFoundError
from localmoe.core.units import format_bytes
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.downloads import discard_download
from localmoe.hub.draft_places import bytes_under, drafts_home, find_homes, record_files
from localmoe.hub.hf_cache import cache_folder, folder_names, repo_folder, snapshots
from localmoe.hub.local_models import DEMO_NAME, list_models, models_folder
from localmoe.hub.names import is_repo_id, safe_name
from localmoe.hub.safetensors_header import shown

_REMOVING = ".removing-"  # a removal that was cut short leaves this, which no list shows


def remove_model(name: str) -> int:
    """Delete one of localmoe's own models and what an unfinished download of it left, or else a
    Mixture-of-Experts model of the Hugging Face cache with all its revisions, and what was made of it:
    drafts, and a file of its experts. Returns the bytes freed.

    Raises:
        ConfigError: it is the embedded model, or lies outside the folders that localmoe may delete from.
        ModelNotFoundError: there is no such model.
        LocalMoeError: the disk refuses, or its download runs.
    """
    if name == DEMO_NAME:
        raise ConfigError("The embedded model is part of localmoe and cannot be removed.")
    if not is_repo_id(name):
        raise ConfigError(
            f"{shown(name)} is not the name of a listed model: localmoe removes only models of its own and "
            f"of the Hugging Face cache; delete other folders yourself.{_made_of(name)}"
        )
    discarded = discard_download(name)
    own = models_folder() / safe_name(name)
    if os.path.lexists(own):
        drafts = _draft_homes(name, [own])
        freed = _remove_folder(own)
    elif any(model.name == name and model.source == "huggingface" for model in list_models()):
        drafts = _draft_homes(name, snapshots(repo_folder(name)))
        freed = _remove_from_cache(name)
    elif discarded:
        return discarded
    else:
        raise ModelNotFoundError(
            f"Model {name} is not among the models that localmoe lists: 'localmoe models' shows them."
            f"{_made_of(name)}"
        )
    if all(model.name != name for model in list_models()):  # else another copy may use the drafts
        freed += sum(_remove_folder(home) for home in drafts)
    return freed + discarded


def remove_made(name: str, *, records_alone: bool = False) -> int:
    """Delete what was made of models of this name, or of the model in this folder, which stay themselves;
    the bytes freed.

    Args:
        records_alone: the files of their experts, which the next load that wants them writes again.

    Raises:
        ModelNotFoundError: there is none. LocalMoeError: the disk refuses.
    """
    homes = find_homes(_plain_name(name)) if name.strip() else ()
    if records_alone:
        files = {path: size for home in homes for path, size in record_files(home).items()}
        if not files:
            raise ModelNotFoundError(f"There is no file of the experts of {shown(name)}.")
        for path in files:
            try:
                path.unlink()
            except OSError as error:
                raise LocalMoeError(f"{path} cannot be removed: {error.strerror or error}.") from error
        for home in homes:
            with suppress(OSError):
                home.rmdir()  # if nothing else was made
        return sum(files.values())
    if not homes:
        raise ModelNotFoundError(
            f"Nothing was made of {shown(name)}, or it is gone: 'localmoe models' shows what there is."
        )
    return sum(_remove_folder(home) for home in homes)


def _plain_name(name: str) -> str:
    """That its drafts are kept by: of a folder its last part."""
    folder = os.path.abspath(os.path.expanduser(name))
    return os.path.basename(folder) if name and os.path.isdir(folder) else name


def _made_of(name: str) -> str:
    """A sentence on what a model that may not be removed has left here."""
    homes = find_homes(_plain_name(name)) if name.strip() else ()
    if not homes:
        return ""
    size, places = format_bytes(sum(map(bytes_under, homes))), " and ".join(map(str, homes))
    return f" Of it {size} of drafts or experts were made here, in {places}: add --made to delete those."


def _draft_homes(name: str, folders: Iterable[Path]) -> list[Path]:
    """Existing draft folders of exactly these models; none for a model too damaged to tell."""
    homes: set[Path] = set()
    for folder in folders:
        with suppress(LocalMoeError):
            homes.add(drafts_home(name, Checkpoint.open(folder).fingerprint()))
    return sorted(home for home in homes if home.is_dir())


def _remove_folder(folder: Path) -> int:
    """Rename out of sight, then delete, so that no half of it is ever taken for a model."""
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(
            f"{folder} is a link or a file, not a folder of localmoe's own: delete it yourself."
        )
    for leftover in folder_names(folder.parent):
        if leftover.startswith(_REMOVING):
            shutil.rmtree(folder.parent / leftover, ignore_errors=True)
    freed = bytes_under(folder)
    doomed = folder.with_name(_REMOVING + folder.name)
    try:
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise LocalMoeError(f"{folder} cannot be removed: {error.strerror or error}.") from error
    return freed


def _remove_from_cache(repo_id: str) -> int:
    """By the Hugging Face library itself, which knows what repos share."""
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir(cache_folder())
    revisions = [
        revision.commit_hash
        for repo in info.repos
        if repo.repo_type == "model" and repo.repo_id == repo_id
        for revision in repo.revisions
    ]
    plan = info.delete_revisions(*revisions)
    plan.execute()
    if not revisions or snapshots(repo_folder(repo_id)):
        raise LocalMoeError(
            f"Model {repo_id} could not be removed from {cache_folder()}: try 'hf cache rm model/{repo_id}'."
        )
    return plan.expected_freed_size
