"""Download a model that the engine can run (`localmoe pull`). Loads nothing; the bytes are hub.downloads'."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from localmoe.core.errors import UnsupportedModelError
from localmoe.core.types import ProgressCallback
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.downloads import DownloadOptions, download_model
from localmoe.hub.weight_files import CONFIG_NAME
from localmoe.model.skeleton import build_skeleton


def pull_model(
    repo_id: str,
    revision: str | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    options: DownloadOptions | None = None,
) -> Path:
    """Download a repo, unless its config tells that the engine cannot run it; returns the model's folder.

    Raises:
        DownloadError, DownloadCancelledError: as `download_model`.
        UnsupportedModelError: dense, quantised, of custom code or of an architecture that is not supported.
    """
    return download_model(
        repo_id,
        revision,
        check=lambda config: check_config(repo_id, config),
        progress=progress,
        cancel=cancel,
        options=options,
    )


def check_config(repo_id: str, config: Mapping[str, Any]) -> None:
    """Build the model without weights, as loading would.

    Raises:
        UnsupportedModelError: as `build_skeleton`, naming the repo.
    """
    with tempfile.TemporaryDirectory(prefix="localmoe-") as name:
        folder = Path(name)
        (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        checkpoint = Checkpoint(folder, dict(config), MappingProxyType({}), (), 0, ())
        try:
            build_skeleton(checkpoint, torch.bfloat16)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(str(error).replace(str(folder), repo_id)) from error
