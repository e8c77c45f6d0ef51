"""What a loaded engine is, in words for people. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localmoe.core.config import MAX_DRAFT_LENGTH, EngineConfig
from localmoe.core.plan_types import MemoryPlan
from localmoe.engine.loading import EngineParts
from localmoe.engine.settings import describe_link, describe_passes
from localmoe.kernels.rows import RowPadding


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is, for people."""

    name: str
    architecture: str
    device: str
    dtype: str
    policy: str
    draft: str
    link: str
    context: int
    has_chat_template: bool
    exactness: str
    passes: str


def describe(
    parts: EngineParts, config: EngineConfig, plan: MemoryPlan, policy: str, *, has_template: bool
) -> EngineInfo:
    """What the parts are, under the settings of now."""
    prepared = parts.prepared
    device = prepared.compute.device
    return EngineInfo(
        name=prepared.source.name,
        architecture=prepared.footprint.architecture,
        device=f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu",
        dtype=str(prepared.compute.dtype).removeprefix("torch."),
        policy=policy,
        draft=str(parts.draft) if parts.draft else f"off: {plan.drafting_reason}",
        link=describe_link(config, device),
        context=plan.context,
        has_chat_template=has_template,
        exactness=describe_exactness(parts.row_padding),
        passes=describe_passes(prepared.compute),
    )


def describe_exactness(rows: RowPadding | None) -> str:
    """Which promise holds on this machine, given what kernels.rows measured."""
    if rows is None:
        return "every token is the target's choice; the last bits may depend on the draft length"
    if rows.max_rows <= MAX_DRAFT_LENGTH:
        return (
            "exact: the same bits for any draft length, policy and VRAM budget "
            f"(drafts are at most {rows.max_rows - 1} tokens long on this device)"
        )
    return "exact: the same bits for any draft length, policy and VRAM budget"
