"""What a loaded engine is, in words for people. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localmoe.core.config import MAX_DRAFT_LENGTH, EngineConfig
from localmoe.core.plan_types import MemoryPlan
from localmoe.engine.loading import EngineParts
from localmoe.engine.planning import PreparedModel
from localmoe.engine.settings import describe_link, describe_passes
from localmoe.kernels.rows import RowPadding
from localmoe.prefetch.registry import decides_within_passes


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
        draft=_describe_draft(parts, plan),
        link=describe_link(config, device),
        context=plan.context,
        has_chat_template=has_template,
        exactness=describe_exactness(parts.row_padding),
        passes=describe_passes(prepared.compute) + _what_is_left_of(policy, prepared),
    )


def _what_is_left_of(policy: str, prepared: PreparedModel) -> str:
    if prepared.compute.whole_passes and decides_within_passes(policy):
        return f"; of {policy}, which decides within a pass, the cache alone"
    return ""


def _describe_draft(parts: EngineParts, plan: MemoryPlan) -> str:
    if parts.draft is not None:
        return str(parts.draft)
    return "prompt lookup" if parts.drafter == "prompt-lookup" else f"off: {plan.drafting_reason}"


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
