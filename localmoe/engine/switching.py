"""Puts a request's switches into the parts of a loaded engine, before it answers. Decides nothing."""

from __future__ import annotations

from localmoe.core.config import EngineConfig
from localmoe.core.switches import Switches
from localmoe.engine.draft_layers import draft_bytes, matrix_layers
from localmoe.engine.loading import EngineParts
from localmoe.model.runner import ModelRunner


def apply_switches(parts: EngineParts, switches: Switches, config: EngineConfig) -> None:
    """Make the next answer do without what is off, and with what is on again.

    Raises:
        DraftError: the draft, which is read again for other products, is not there any more.
    """
    if not isinstance(parts.runner, ModelRunner):
        device_passes = parts.runner.passes
        device_passes.memory.copies_beside = switches.copies_beside
        device_passes.fused_draft = switches.fused_draft
        return
    passes = parts.runner.passes
    passes.memory.layer_batches = switches.layer_batches
    passes.scheduler.settle = None if switches.copies_beside else passes.memory.settle
    if passes.draft is not None and parts.fused_draft != switches.fused_draft:
        prepared = parts.prepared
        parts.draft, layers = prepared.source.load_draft(  # a better one, if it was made meanwhile
            prepared.skeleton,
            parts.store,
            prepared.compute.device,
            config.draft_dir,
            packed=False,
            fused=switches.fused_draft,
            progress=None,
            cancel=None,
        )
        passes.draft, parts.draft_bytes = matrix_layers(layers), draft_bytes(layers)
        parts.fused_draft = switches.fused_draft
