"""The models on this machine, in one place to import from. Adds only where a model's draft belongs."""

from __future__ import annotations

from pathlib import Path

from localmoe.core.home import localmoe_home
from localmoe.hub.draft_places import DEMO_DRAFT_NAME, drafts_home, kind_name
from localmoe.hub.local_models import LocalModel, demo_folder, list_models, models_folder, resolve_model
from localmoe.hub.removal import remove_made, remove_model

__all__ = [
    "LocalModel",
    "demo_folder",
    "draft_folder",
    "list_models",
    "localmoe_home",
    "models_folder",
    "remove_made",
    "remove_model",
    "resolve_model",
]


def draft_folder(model: LocalModel, method: str, bits: int, group_size: int, fingerprint: str) -> Path:
    """Where the draft of this kind lies or will lie; it need not exist. The embedded model's own draft is
    beside it, all others are in localmoe's home."""
    kind = kind_name(method, bits, group_size)
    if model.source == "demo" and f"draft-{kind}" == DEMO_DRAFT_NAME:
        return model.folder / DEMO_DRAFT_NAME
    return drafts_home(model.name, fingerprint) / kind
