"""A search of the Hub, sorted into what the engine may run and what it cannot, by architecture. Asks for no
config: `facts.repo_facts` has the last word on a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import transformers

from localmoe.hub.model_folder import EXPERT_COUNTS
from localmoe.hub.search import SearchHit, search_models
from localmoe.model.own_code import needs_own_code

ArchitectureKind = Literal["moe", "dense", "either", "unknown"]


def search_runnable(query: str, limit: int = 50) -> list[SearchHit]:
    """As `search_models`; first what may run, then the rest with the reason.

    Raises:
        DownloadError: the Hub cannot be asked, or refuses.
    """
    hits = [hit if hit.refusal else _judged(hit) for hit in search_models(query, limit)]
    return sorted(hits, key=lambda hit: bool(hit.refusal))


def _judged(hit: SearchHit) -> SearchHit:
    if not hit.architecture:
        return hit  # its config tells, as it does where the architecture may have experts or none
    if needs_own_code(hit.config):
        return replace(hit, refusal="it needs Python code of its own, which localmoe never runs")
    kind = architecture_kind(hit.architecture)
    if kind == "dense":
        return replace(hit, refusal=f"{hit.architecture} is no Mixture of Experts")
    if kind == "unknown":
        return replace(hit, refusal=f"{hit.architecture} is an architecture that transformers does not know")
    return hit


def architecture_kind(model_type: str) -> ArchitectureKind:
    """Whether configs of this model_type count experts, by their defaults; either where their text part may
    be any architecture's."""
    try:
        config = transformers.AutoConfig.for_model(model_type)
        values = config.to_dict()
    except Exception:  # unknown, or a config class that cannot be made from nothing
        return "unknown"
    text = values.get("text_config")
    parts = [values, text] if isinstance(text, dict) else [values]
    if any(key in part for part in parts for key in EXPERT_COUNTS):
        return "moe"
    return "either" if config.sub_configs.get("text_config") is transformers.AutoConfig else "dense"
