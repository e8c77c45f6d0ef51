"""Checks repo ids and turns model names into file names. Looks at no disk."""

from __future__ import annotations

import re

_REPO_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]{0,95}/)?[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def is_repo_id(text: str) -> bool:
    """Whether this is a repo id of the Hugging Face Hub ("name" or "owner/name"), by the Hub's own rules.
    Such a text needs no quoting in a shell and stays one folder name under any root."""
    return (
        _REPO_ID.fullmatch(text) is not None
        and "--" not in text
        and ".." not in text
        and not text.endswith((".", "-", ".git"))
        and "./" not in text
        and "-/" not in text
    )


def safe_name(name: str) -> str:
    """A model's name as one file name: "owner/name" becomes "owner--name", anything odd a "-". Repo ids keep
    all of their characters, of which there are at most 194, so that each has a folder of its own; other names
    are cut."""
    safe = _UNSAFE.sub("-", name.replace("/", "--")).strip(".-")
    return (safe if is_repo_id(name) else safe[:100]) or "model"


def repo_id_of(folder_name: str) -> str:
    """The repo id that `safe_name` made this folder name of; the name itself if it is none."""
    repo_id = folder_name.replace("--", "/", 1)
    return repo_id if is_repo_id(repo_id) else folder_name
