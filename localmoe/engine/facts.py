"""What has to be known of a model to tell whether it fits: from a repo's config on the Hub, or a folder here.
Reads no weights, divides no memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from localmoe.core.errors import HubUnreachableError, UnsupportedModelError
from localmoe.core.model_facts import ModelFacts, MtpSizes
from localmoe.engine.device_support import why_not_in_kernels, why_not_in_place
from localmoe.engine.model_source import as_found
from localmoe.engine.mtp_drafts import mtp_sizes
from localmoe.engine.sources import CheckpointSource
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.download_plan import check_is_moe, choose_files, needs_index
from localmoe.hub.draft_places import drafts_home, record_files
from localmoe.hub.float8_tensors import is_in_codes
from localmoe.hub.http_errors import TransientError
from localmoe.hub.local_models import resolve_model
from localmoe.hub.mtp_tensors import has_mtp
from localmoe.hub.remote_repo import RemoteRepo
from localmoe.hub.weight_files import CONFIG_NAME
from localmoe.model.footprint import checkpoint_dtype, measure_footprint
from localmoe.model.mtp_layer import mtp_skeleton
from localmoe.model.skeleton import Skeleton, build_skeleton
from localmoe.model.tying import untie_named

_TEXT_PARTS = ("text_config", "language_config", "llm_config")


def repo_facts(repo_id: str, revision: str | None = None) -> ModelFacts:
    """Ask the Hub.

    Raises:
        DownloadError: no such repo, no access, or no network.
        UnsupportedModelError: the engine cannot run it.
    """
    repo = RemoteRepo(repo_id)
    try:
        about = repo.about(revision)
        snapshot = about.snapshot
        config = repo.read_config(snapshot)
        check_is_moe(repo_id, config)
        skeleton = config_skeleton(repo_id, config)
        index = needs_index(snapshot)
        entries = None if index is None else repo.read_json(index, snapshot.commit)
        listed = (entries or {}).get("weight_map")
        named = listed if isinstance(listed, dict) else {}
        untie_named(skeleton.model, named)
        num_bytes = sum(file.num_bytes for file in choose_files(snapshot, entries))
    except TransientError as error:
        raise HubUnreachableError(
            f"The Hub cannot be reached ({error}): check the connection and try again."
        ) from error
    stored, unsuited = published_dtype(config), why_not_in_kernels(skeleton)
    return ModelFacts(
        footprint=measure_footprint(repo_id, stored, skeleton, knows_state=not unsuited),
        weight_bytes=stored.itemsize,
        num_bytes=num_bytes,
        unsuited=unsuited,
        unsuited_in_place=why_not_in_place(skeleton),
        mtp=_mtp(skeleton, stored) if has_mtp(named) else None,
        licence=about.licence,
        gated=about.gated,
        revision=snapshot.commit,
    )


def local_facts(model: str) -> ModelFacts:
    """Look at a model on this machine.

    Raises:
        LocalMoeError: it is not there, damaged, or the engine cannot run it.
    """
    found = resolve_model(model)
    checkpoint = Checkpoint.open(found.folder)
    stored = checkpoint_dtype(checkpoint)
    skeleton = build_skeleton(checkpoint, stored)
    unsuited = why_not_in_kernels(skeleton)
    footprint = measure_footprint(found.name, stored, skeleton, knows_state=not unsuited)
    source = CheckpointSource(found, checkpoint)
    return ModelFacts(
        footprint=as_found(footprint, source, skeleton),
        weight_bytes=stored.itemsize,
        num_bytes=checkpoint.total_bytes,
        unsuited=unsuited,
        unsuited_in_place=why_not_in_place(skeleton),
        has_draft=bool(found.drafts),
        record_files=tuple(record_files(drafts_home(found.name, checkpoint.fingerprint())).values()),
        mtp=_mtp(skeleton, stored) if source.has_mtp() else None,
    )


def _mtp(skeleton: Skeleton, stored: torch.dtype) -> MtpSizes | None:
    """Of a model with such a layer, if it can draft."""
    try:
        return mtp_sizes(mtp_skeleton(skeleton, stored))
    except UnsupportedModelError:
        return None


def config_skeleton(repo_id: str, config: Mapping[str, Any]) -> Skeleton:
    """Build the model of a config without weights, as loading would.

    Raises:
        UnsupportedModelError: as `build_skeleton`, naming the repo.
    """
    with tempfile.TemporaryDirectory(prefix="localmoe-") as name:
        folder = Path(name)
        (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        checkpoint = Checkpoint(folder, dict(config), MappingProxyType({}), (), 0, ())
        try:
            return build_skeleton(checkpoint, published_dtype(config))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(str(error).replace(str(folder), repo_id)) from error


def published_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """What a config says of the published weights, itself or in the part for text; 16 bits where it says
    nothing that they can be, and where they are made of FP8, NVFP4 or INT4. To be read as it is published:
    transformers writes there what it builds in."""
    if is_in_codes(config):
        return torch.bfloat16
    known = {str(one).removeprefix("torch."): one for one in (torch.bfloat16, torch.float16, torch.float32)}
    parts = [config, *(config[name] for name in _TEXT_PARTS if isinstance(config.get(name), dict))]
    said = (str(part.get(name)).removeprefix("torch.") for part in parts for name in ("dtype", "torch_dtype"))
    return next((known[name] for name in said if name in known), torch.bfloat16)
