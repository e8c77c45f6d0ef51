"""Where drafts lie on disk. Opens none of them and does not decide whether one fits its model."""

from __future__ import annotations

import re
from pathlib import Path

from localmoe.core.home import localmoe_home
from localmoe.hub.hf_cache import folder_names
from localmoe.hub.names import safe_name

DEMO_DRAFT_NAME = "draft-int4-gptq-g128"
FINGERPRINT_CHARS = 12  # of the base model's fingerprint in a draft folder's name
NF4_KIND = "nf4-g64"
_KIND = re.compile(r"int\d+-[a-z0-9]+-g\d+|" + NF4_KIND)


def kind_name(method: str, bits: int, group_size: int) -> str:
    """One folder name for how a draft was made, e.g. "int4-gptq-g128" or "nf4-g64"."""
    kind = f"{method}-g{group_size}" if method == "nf4" else f"int{bits}-{method}-g{group_size}"
    assert _KIND.fullmatch(kind), kind
    return kind


def drafts_home(name: str, fingerprint: str) -> Path:
    """The folder of all drafts of one model, told apart from others of its name by its fingerprint."""
    return localmoe_home() / "drafts" / f"{safe_name(name)}-{fingerprint[:FINGERPRINT_CHARS]}"


def find_drafts(name: str) -> tuple[Path, ...]:
    """Drafts of all models of this name."""
    root = localmoe_home() / "drafts"
    pattern = re.compile(re.escape(safe_name(name)) + f"-[0-9a-f]{{{FINGERPRINT_CHARS}}}")
    homes = [root / entry for entry in folder_names(root) if pattern.fullmatch(entry)]
    return tuple(home / kind for home in homes for kind in folder_names(home) if _KIND.fullmatch(kind))
