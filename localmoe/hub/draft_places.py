"""Where drafts, and files of experts, lie on disk. Opens none of them and does not decide whether one fits
its model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from localmoe.core.home import localmoe_home
from localmoe.hub.hf_cache import folder_names
from localmoe.hub.names import safe_name

DEMO_DRAFT_NAME = "draft-int4-gptq-g128"
FINGERPRINT_CHARS = 12  # of the base model's fingerprint in a draft folder's name
NF4_KIND = "nf4-g64"
_HOME = re.compile(f"(.+)-[0-9a-f]{{{FINGERPRINT_CHARS}}}")
_RECORDS = re.compile(r"experts-[a-z0-9_]+-[a-z0-9]+\.records")
_KIND = re.compile(r"int\d+-[a-z0-9]+-g\d+|" + NF4_KIND)


def kind_name(method: str, bits: int, group_size: int) -> str:
    """One folder name for how a draft was made, e.g. "int4-gptq-g128" or "nf4-g64"."""
    kind = f"{method}-g{group_size}" if method == "nf4" else f"int{bits}-{method}-g{group_size}"
    assert _KIND.fullmatch(kind), kind
    return kind


def drafts_home(name: str, fingerprint: str) -> Path:
    """The folder of all drafts of one model, told apart from others of its name by its fingerprint."""
    return localmoe_home() / "drafts" / f"{safe_name(name)}-{fingerprint[:FINGERPRINT_CHARS]}"


def find_homes(name: str) -> tuple[Path, ...]:
    """What was made of all models of this name: a folder each."""
    return tuple(home for of, home in _homes() if of == safe_name(name))


def homes_of_others(names: Iterable[str]) -> list[tuple[str, Path]]:
    """The same of models that have none of these names, each with its own as a file name."""
    known = {safe_name(name) for name in names}
    return [(of, home) for of, home in _homes() if of not in known]


def _homes() -> list[tuple[str, Path]]:
    root = localmoe_home() / "drafts"
    found = ((_HOME.fullmatch(entry), root / entry) for entry in folder_names(root))
    return [(match[1], home) for match, home in found if match is not None]


def bytes_under(folder: Path) -> int:
    """Bytes of the files in a folder, not following links, but for those that vanish meanwhile."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(root, file)).st_size
    return total


def find_drafts(name: str) -> tuple[Path, ...]:
    """Drafts of all models of this name."""
    homes = find_homes(name)
    return tuple(home / kind for home in homes for kind in folder_names(home) if _KIND.fullmatch(kind))


def record_files(home: Path) -> dict[Path, int]:
    """Files of experts (experts.record_file) in the folder of a model's drafts, and their bytes."""
    found: dict[Path, int] = {}
    with suppress(OSError):
        for entry in sorted(os.scandir(home), key=lambda entry: entry.name):
            if _RECORDS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                found[Path(entry.path)] = entry.stat(follow_symlinks=False).st_size
    return found
