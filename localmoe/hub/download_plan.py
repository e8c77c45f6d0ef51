"""Chooses which files of a repo make up a model that localmoe can load. Fetches none of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from localmoe.core.errors import DownloadError, UnsupportedModelError
from localmoe.hub.model_folder import is_moe
from localmoe.hub.modelopt_config import FILE_NAME
from localmoe.hub.picture_settings import PROCESSOR_FILES
from localmoe.hub.remote_files import RemoteFile, RemoteSnapshot
from localmoe.hub.safetensors_header import shown
from localmoe.hub.weight_files import CONFIG_NAME, INDEX_NAME, SINGLE_NAME

_TEXT_FILES = frozenset(
    {
        CONFIG_NAME, INDEX_NAME, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "tokenizer.model", "tiktoken.model", "spiece.model", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
        *PROCESSOR_FILES, FILE_NAME,
    }
)  # fmt: skip
# the same weights once more in their makers' own layout, which transformers does not read
_OTHER_LAYOUT = re.compile(r"consolidated.*\.safetensors")


def needs_index(snapshot: RemoteSnapshot) -> RemoteFile | None:
    """The weight index that must be read before files can be chosen."""
    return snapshot.find(INDEX_NAME)


def check_is_moe(repo_id: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError: the config names no experts."""
    if not is_moe(config):
        kind = shown(str(config.get("model_type", "unknown")))
        raise UnsupportedModelError(
            f"{repo_id} ({kind}) is no Mixture-of-Experts model by its {CONFIG_NAME}: choose one that is, "
            "such as Qwen/Qwen1.5-MoE-A2.7B-Chat."
        )


def choose_files(snapshot: RemoteSnapshot, index: Mapping[str, Any] | None) -> tuple[RemoteFile, ...]:
    """Config, tokenizer, templates, how pictures are read, and safetensors weights, small files first; no
    pickles, no code, no other layouts of the same weights.

    Args:
        index: what `needs_index`'s file holds.

    Raises:
        UnsupportedModelError: the repo has no safetensors weights.
        DownloadError: the index names files that the repo lacks or that are not plain names.
    """
    texts = [file for file in snapshot.files if file.name in _TEXT_FILES]
    if index is not None and _is_left_over(snapshot, index):
        index, texts = None, [file for file in texts if file.name != INDEX_NAME]
    weights = _weights(snapshot) if index is None else _indexed(snapshot, index)
    if not weights:
        raise UnsupportedModelError(
            f"{snapshot.repo_id} has no safetensors weights: localmoe reads safetensors alone, because they "
            "run no code; look for a repo that has them."
        )
    return (*sorted(texts, key=lambda file: file.num_bytes), *sorted(weights, key=lambda file: file.name))


def _is_left_over(snapshot: RemoteSnapshot, index: Mapping[str, Any]) -> bool:
    """Whether it is of shards that a single file has replaced, which transformers reads too."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not _all_texts(weight_map):
        return False
    present = {file.name for file in snapshot.files}
    return SINGLE_NAME in present and present.isdisjoint(weight_map.values())


def _weights(snapshot: RemoteSnapshot) -> list[RemoteFile]:
    single = snapshot.find(SINGLE_NAME)
    if single is not None:
        return [single]
    candidates = [file for file in snapshot.files if file.is_plain and file.name.endswith(".safetensors")]
    return [file for file in candidates if not _OTHER_LAYOUT.fullmatch(file.name)]


def _indexed(snapshot: RemoteSnapshot, index: Mapping[str, Any]) -> list[RemoteFile]:
    weight_map = index.get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) and _all_texts(weight_map) else set()
    if not names:
        raise DownloadError(
            f"The weight index of {snapshot.repo_id} is damaged: choose another revision or repo."
        )
    files = []
    for name in names:
        file = snapshot.find(name)
        if file is None or not file.is_plain or not name.endswith(".safetensors"):
            raise DownloadError(
                f"The weight index of {snapshot.repo_id} names {shown(name)}, which is no weight file of the "
                "repo: choose another revision or repo."
            )
        files.append(file)
    return files


def _all_texts(weight_map: Mapping[str, object]) -> bool:
    return all(isinstance(name, str) for name in weight_map.values())
