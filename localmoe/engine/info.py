"""What a loaded engine is, in words for people. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localmoe.chat.prompt import Encoder
from localmoe.core.config import MAX_DRAFT_LENGTH, DrafterName, EngineConfig, SamplingConfig, Thinking
from localmoe.core.plan_types import MemoryPlan
from localmoe.engine.loading import EngineParts
from localmoe.engine.planning import PreparedModel
from localmoe.engine.settings import describe_link, describe_passes
from localmoe.engine.stepping import LOOKUP, looks_up
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.in_place import InPlaceMemory
from localmoe.kernels.rows import RowPadding
from localmoe.model.runner import ModelRunner
from localmoe.prefetch.registry import decides_within_passes


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is, for people.

    Attributes:
        cpu_bytes_per_s: at which the CPU computes experts of one token beside passes on a GPU, as measured
            when they were loaded; None: it computes none.
        may_be_in_place: without a budget experts are computed where they lie, with one they need slots; to
            change from one to the other takes a load.
        looks_up: tokens are proposed by looking up in the text (speculative.prompt_lookup).
        own_sampling: how the model's makers recommend to choose tokens; None: they do not.
        thinking: what one may choose of how it thinks before it answers; () if nothing.
        drafter: with which it was loaded, whether or not there is memory for a draft; never "auto".
        reads_images: messages may have pictures.
    """

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
    lanes: str
    cpu_bytes_per_s: float | None = None
    may_be_in_place: bool = False
    looks_up: bool = False
    own_sampling: SamplingConfig | None = None
    thinking: tuple[Thinking, ...] = ()
    drafter: DrafterName = "self"
    reads_images: bool = False


def describe(
    parts: EngineParts, config: EngineConfig, plan: MemoryPlan, policy: str, rates: str, encoder: Encoder
) -> EngineInfo:
    """What the parts are, under the settings of now. rates: why the draft is laid aside, if it is.
    encoder: of their prompts."""
    prepared = parts.prepared
    device = prepared.compute.device
    return EngineInfo(
        name=prepared.source.name,
        architecture=prepared.footprint.architecture,
        device=f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu",
        dtype=str(prepared.compute.dtype).removeprefix("torch."),
        policy=policy,
        draft=_describe_draft(parts, config, plan, rates),
        link=describe_link(config, prepared.compute),
        context=plan.context,
        has_chat_template=encoder.has_template,
        exactness=describe_exactness(parts.row_padding, cpu_sums=uses_cpu(parts), in_place=plan.in_place),
        passes=describe_passes(prepared.compute) + _what_is_left_of(policy, prepared),
        lanes=describe_lanes(parts),
        cpu_bytes_per_s=cpu_rate(parts),
        may_be_in_place=prepared.may_be_in_place,
        looks_up=looks_up(parts, config),
        own_sampling=prepared.source.own_sampling,
        thinking=encoder.thinking.choices,
        drafter=parts.drafter,
        reads_images=parts.runner.images is not None,
    )


def _what_is_left_of(policy: str, prepared: PreparedModel) -> str:
    if prepared.compute.whole_passes and decides_within_passes(policy):
        return f"; of {policy}, which decides within a pass, the cache alone"
    return ""


def _describe_draft(parts: EngineParts, config: EngineConfig, plan: MemoryPlan, rates: str) -> str:
    if plan.draft_aside:
        return f"{parts.draft}, laid aside for experts in its memory" + (f": {rates}" if rates else "")
    if parts.draft is not None:
        return str(parts.draft)
    if parts.other is not None:
        return str(parts.other)
    if not looks_up(parts, config):
        return f"off: {plan.drafting_reason}"
    asked_for = parts.drafter == LOOKUP
    return "prompt lookup" if asked_for else f"prompt lookup, as there is no draft: {plan.drafting_reason}"


def uses_cpu(parts: EngineParts) -> bool:
    """Whether experts may be computed on the CPU for passes that run on a GPU."""
    return not isinstance(parts.runner, ModelRunner) and parts.runner.passes.lane is not None


def cpu_rate(parts: EngineParts) -> float | None:
    """Bytes a second, see EngineInfo."""
    if isinstance(parts.runner, ModelRunner):
        return None
    lane = parts.runner.passes.lane
    if lane is None or lane.failure:
        return None
    return parts.prepared.footprint.expert_bytes / (lane.measured.first_us * 1e-6)


def describe_lanes(parts: EngineParts) -> str:
    """For people: where experts that are not in VRAM come from."""
    if isinstance(parts.runner, ModelRunner):
        memory = parts.runner.passes.memory
        if isinstance(memory, InPlaceMemory):
            threads = f"{memory.lane.num_threads} threads"
            if isinstance(memory.store, DiskStore):
                return f"CPU, from RAM, and from the disk what is not there ({threads})"
            return f"CPU, where they lie in RAM ({threads})"
        words = "VRAM and PCIe" if parts.prepared.compute.device.type == "cuda" else "RAM"
        return f"{words}, from the disk" if isinstance(memory.store, DiskStore) else words
    passes = parts.runner.passes
    return passes.lane.failure if passes.lane is not None and passes.lane.failure else passes.lanes


def describe_exactness(rows: RowPadding | None, *, cpu_sums: bool = False, in_place: bool = False) -> str:
    """Which promise holds on this machine, given what kernels.rows measured. cpu_sums: the CPU lane is in
    use beside a GPU. in_place: experts are computed where they lie, in another order than through slots."""
    whatever = "any draft length and policy" if in_place else "any draft length, policy and VRAM budget"
    if cpu_sums:
        return (
            "the published weights, every token the target's choice; the CPU's sums run in another "
            "order, so last bits may depend on timing (strict leaves the CPU out)"
        )
    if rows is None:
        return "every token is the target's choice; the last bits may depend on the draft length"
    if rows.max_rows <= MAX_DRAFT_LENGTH:
        return (
            f"exact: the same bits for {whatever} "
            f"(drafts are at most {rows.max_rows - 1} tokens long on this device)"
        )
    return f"exact: the same bits for {whatever}"
