"""Build a draft as a task of its own (`localmoe draft`, the page's "build draft"). Loads the experts, keeps
no engine."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from localmoe.core.errors import ConfigError
from localmoe.core.types import ProgressCallback
from localmoe.engine.drafts import GROUP_SIZE, HostExpertSource, expert_naming
from localmoe.hardware.host_room import host_room
from localmoe.hardware.plan import check_records
from localmoe.hardware.probe import probe_hardware
from localmoe.hub.catalogue import draft_folder, resolve_model
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.footprint import checkpoint_dtype
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import build_skeleton
from localmoe.quant.builder import build_rtn_draft

METHODS = ("rtn",)
BITS = (4,)


def build_draft(
    model: str,
    out: Path | None = None,
    *,
    method: str = "rtn",
    bits: int = 4,
    group_size: int = GROUP_SIZE,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Quantise a model's routed experts and publish the draft, by default where `Engine.load` looks for it.

    Raises:
        LocalMoeError: the model is not there or not supported, the settings are out of range, the experts
            do not fit into RAM, or the disk is full.
    """
    if method not in METHODS or bits not in BITS:
        raise ConfigError(
            f"A draft of {bits} bits by method '{method}' cannot be built: "
            "use method rtn (round to nearest) and 4 bits."
        )
    if group_size not in (32, 64, 128, 256):
        raise ConfigError(f"Group size {group_size} is out of range: use 32, 64, 128 or 256.")
    source = resolve_model(model)
    checkpoint = Checkpoint.open(source.folder)
    skeleton = build_skeleton(checkpoint, checkpoint_dtype(checkpoint))
    fingerprint = checkpoint.fingerprint()
    if out is None:
        out = draft_folder(source, method, bits, group_size, fingerprint)
    stored = checkpoint_dtype(checkpoint)
    records = skeleton.num_experts * sum(experts.layout.num_bytes(stored) for experts in skeleton.experts)
    check_records(source.name, records, host_room(probe_hardware(measure=False), device="cpu"))
    store = load_weights(skeleton, checkpoint, device=torch.device("cpu"), progress=progress, cancel=cancel)
    return build_rtn_draft(
        HostExpertSource(skeleton, store),
        out,
        config=checkpoint.config,
        naming=expert_naming(checkpoint, skeleton),
        base_model=source.name,
        base_fingerprint=fingerprint,
        group_size=group_size,
        progress=progress,
        cancel=cancel,
    )
