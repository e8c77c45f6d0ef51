"""Finds the models on this machine. Does not download, and does not decide whether the engine supports a
model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localmoe.core.errors import CheckpointError, LocalMoeError, ModelNotFoundError
from localmoe.core.home import models_home
from localmoe.hub.draft_places import (
    DEMO_DRAFT_NAME,
    bytes_under,
    find_drafts,
    find_homes,
    record_files,
)
from localmoe.hub.hf_cache import cached_repos, complete_snapshot, folder_names, repo_folder
from localmoe.hub.model_folder import FolderFacts, read_folder
from localmoe.hub.names import is_repo_id, repo_id_of, safe_name
from localmoe.hub.safetensors_header import shown

DEMO_NAME = "demo"
Source = Literal["demo", "localmoe", "huggingface", "folder"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model folder that is complete as far as its file names tell.

    Attributes:
        name: "demo", a repo id, or the last part of the folder that the user gave; never a path.
        num_bytes: bytes of the weight files.
        architecture: the config's model_type.
        drafts: drafts that were made for a model of this name (loading one checks the fingerprint).
        made_bytes: of all that was made of models of this name on this machine; record_bytes: of that, of
            files of their experts.
    """

    name: str
    folder: Path
    num_bytes: int
    architecture: str
    drafts: tuple[Path, ...]
    source: Source
    made_bytes: int = 0
    record_bytes: int = 0


def demo_folder() -> Path:
    """The embedded model, in the checkout."""
    return Path(__file__).resolve().parents[2] / "assets" / "demo-moe"


def models_folder() -> Path:
    """Where localmoe keeps models of its own: one folder each, named as `names.safe_name` does."""
    return models_home()


def list_models() -> list[LocalModel]:
    """The embedded model, localmoe's own models, and the complete Mixture-of-Experts models of the Hugging
    Face cache; what cannot be read is left out. `resolve_model` finds each by its name."""
    models: list[LocalModel] = []
    with suppress(LocalMoeError):
        models.append(_demo())
    for find in (_own_models, _cached_models):
        taken = {model.name for model in models}
        models += [model for model in find() if model.name not in taken]
    return models


def resolve_model(model: str) -> LocalModel:
    """The model that a user means by "demo", a folder, or the repo id of a model on this machine.

    Raises:
        ModelNotFoundError: there is no such model; says what to do.
        LocalMoeError: it is there, but incomplete, damaged or in another format.
    """
    if model == DEMO_NAME:
        return _demo()
    folder = Path(os.path.abspath(os.path.expanduser(model))) if model else None
    if folder is not None and os.path.isdir(folder):
        if folder == demo_folder():
            return _demo()
        return _local(folder.name, folder, read_folder(folder), "folder")
    if not is_repo_id(model):
        raise ModelNotFoundError(
            f"{shown(model)} is neither a folder on this machine nor a repo id: give a model folder, a repo "
            "id such as Qwen/Qwen1.5-MoE-A2.7B-Chat, or demo."
        )
    own = models_folder() / safe_name(model)
    if os.path.isdir(own):  # of what may not be looked into, Path would raise
        return _local(model, own, read_folder(own), "localmoe")
    return _resolve_cached(model)


def _local(name: str, folder: Path, facts: FolderFacts, source: Source) -> LocalModel:
    return LocalModel(
        name, folder, facts.num_bytes, facts.architecture, find_drafts(name), source, *_made_bytes(name)
    )


def _made_bytes(name: str) -> tuple[int, int]:
    """All, and of files of experts."""
    homes = find_homes(name)
    records = sum(size for home in homes for size in record_files(home).values())
    return sum(map(bytes_under, homes)), records


def _demo() -> LocalModel:
    folder = demo_folder()
    facts = read_folder(folder)
    drafts = find_drafts(DEMO_NAME)
    if (folder / DEMO_DRAFT_NAME).is_dir():
        drafts = (folder / DEMO_DRAFT_NAME, *drafts)
    made = _made_bytes(DEMO_NAME)
    return LocalModel(DEMO_NAME, folder, facts.num_bytes, facts.architecture, drafts, "demo", *made)


def _own_models() -> Iterator[LocalModel]:
    for entry in folder_names(models_folder()):
        name = repo_id_of(entry)
        if not is_repo_id(name):
            continue  # a temporary folder, or one that no name leads to
        with suppress(LocalMoeError):
            facts = read_folder(models_folder() / entry)
            if facts.is_moe:
                yield _local(name, models_folder() / entry, facts, "localmoe")


def _cached_models() -> Iterator[LocalModel]:
    for repo_id in cached_repos():
        with suppress(LocalMoeError):
            snapshot, facts = complete_snapshot(repo_id)
            if facts.is_moe:
                yield _local(repo_id, snapshot, facts, "huggingface")


def _resolve_cached(repo_id: str) -> LocalModel:
    if not os.path.isdir(repo_folder(repo_id)):
        raise ModelNotFoundError(
            f"Model {repo_id} is not on this machine: download it with 'localmoe pull {repo_id}', or give "
            "the folder that holds it."
        )
    try:
        snapshot, facts = complete_snapshot(repo_id)
    except (CheckpointError, ModelNotFoundError) as error:
        raise type(error)(
            f"Model {repo_id} is not complete in the Hugging Face cache: download it with 'localmoe pull "
            f"{repo_id}'. ({error})"
        ) from error
    return _local(repo_id, snapshot, facts, "huggingface")
