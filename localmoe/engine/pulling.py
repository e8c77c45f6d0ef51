"""Download a model that the engine can run (`localmoe pull`), or a ready-made draft. Loads nothing; the
bytes are hub.downloads'."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localmoe.core.errors import UnsupportedModelError
from localmoe.core.types import ProgressCallback
from localmoe.engine.facts import config_skeleton
from localmoe.hub.downloads import DownloadOptions, download_model


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


def pull_draft(
    repo_id: str,
    revision: str | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    options: DownloadOptions | None = None,
) -> Path:
    """Download a ready-made GPTQ checkpoint, to draft with; returns its folder. Whether it belongs to a
    model is checked against that model's weights, at load.

    Raises:
        DownloadError, DownloadCancelledError: as `download_model`.
        UnsupportedModelError: it is no GPTQ checkpoint, or dense.
    """
    return download_model(
        repo_id,
        revision,
        check=lambda config: check_is_gptq(repo_id, config),
        progress=progress,
        cancel=cancel,
        options=options,
    )


def check_config(repo_id: str, config: Mapping[str, Any]) -> None:
    """Build the model without weights, as loading would.

    Raises:
        UnsupportedModelError: as `build_skeleton`, naming the repo.
    """
    config_skeleton(repo_id, config)


def check_is_gptq(repo_id: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError: the config names no GPTQ quantisation."""
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method != "gptq":
        kind = f"quantised otherwise ({method})" if quantised else "not quantised"
        raise UnsupportedModelError(
            f"{repo_id} is {kind}, and a ready-made draft is a GPTQ checkpoint: choose one of the same "
            "model, such as Qwen/Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4."
        )
