"""What the engine says in the log: plans, loads, budgets, one line an answer. Figures and names only: never a
prompt, an answer or a token."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from localmoe.core.errors import LocalMoeError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.stats import GenerationStats
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_bytes
from localmoe.kernels.weight_forms import WeightForm

if TYPE_CHECKING:  # it imports what logs
    from localmoe.engine.info import EngineInfo

_LOG = logging.getLogger("localmoe.engine")


def log_loaded(info: EngineInfo, plan: MemoryPlan, footprint: ModelFootprint) -> None:
    """A model is ready."""
    _LOG.info(
        "loaded %s on %s in %s, context %d; policy %s; draft: %s; lanes: %s; link: %s; steps: %s",
        info.name, info.device, info.dtype, info.context, info.policy, info.draft, info.lanes, info.link,
        info.passes,
    )  # fmt: skip
    log_plan(plan, footprint)


def log_plan(plan: MemoryPlan, footprint: ModelFootprint) -> None:
    """How a budget is divided."""
    if footprint.keeps_bf12:
        _LOG.info("experts are packed into 12 bits a weight, without loss")
    elif footprint.keeps_codes:
        _LOG.info("experts stay in %s, as they are published", WeightForm(footprint.expert_form).shown)
    if footprint.packs_head:
        alone = "the output head is packed into 12 bits a weight, without loss"
        _LOG.info("so is the output head" if footprint.keeps_bf12 else alone)
    if plan.in_place:
        _LOG.info(
            "RAM: experts %s, computed there; shared weights %s, draft %s, KV cache %s, workspace %s",
            format_bytes(plan.host_bytes - plan.host_embedding_bytes),
            format_bytes(plan.shared_bytes + plan.host_embedding_bytes), format_bytes(plan.draft_bytes),
            format_bytes(plan.kv_bytes), format_bytes(plan.workspace_bytes),
        )  # fmt: skip
        return
    _LOG.info(
        "budget %s: shared weights %s, draft %s, KV cache %s, workspace %s, slots for %d of %d experts",
        format_bytes(plan.budget_bytes), format_bytes(plan.shared_bytes), format_bytes(plan.draft_bytes),
        format_bytes(plan.kv_bytes), format_bytes(plan.workspace_bytes),
        min(plan.num_slots, footprint.total_experts), footprint.total_experts,
    )  # fmt: skip


def log_image(tokens: int, seconds: float) -> None:
    """A picture was read."""
    _LOG.info("a picture of %d tokens was read in %.2f s", tokens, seconds)


def log_no_draft(reason: str) -> None:
    """A model goes on without the draft that it should have had."""
    _LOG.warning("no drafting: %s", reason)


def log_no_layer(model: str, reason: str) -> None:
    """A model is loaded without the MTP layer that would have drafted."""
    _LOG.warning("%s is loaded without its MTP layer, which cannot be read: %s", model, reason)


def log_not_captured() -> None:
    """Passes are captured when answers need them, if there is memory then."""
    _LOG.warning("the GPU's memory does not suffice to capture passes ahead, as other programs use it too")


def log_no_captures() -> None:
    """The same where the system has no thread to give."""
    _LOG.warning("no thread can begin that captures passes ahead: answers capture what they need")


def log_not_filled(error: LocalMoeError) -> None:
    """Slots are filled by what answers ask for."""
    _LOG.warning("slots are not filled ahead: %s", error)


def log_draft_moved(reason: str, *, aside: bool) -> None:
    """Experts have the draft's memory now, or gave it back. reason: the rates that were measured, if any."""
    _LOG.info(
        "the draft %s%s",
        "is laid aside, experts have its memory" if aside else "is back in device memory",
        f": {reason}" if reason else "",
    )


def log_better_draft(description: str) -> None:
    """A draft was exchanged."""
    _LOG.info("the model drafts with a better draft now: %s", description)


def log_answer(reason: str, stats: GenerationStats) -> None:
    """An answer is over. reason: why it ended."""
    parts = [
        f"{stats.prompt_tokens} tokens of prompt ({stats.reused_tokens} reused)",
        f"{stats.new_tokens} new", f"first after {stats.ttft_s:.2f} s",
    ]  # fmt: skip
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} tok/s")
    if stats.hit_rate is not None:
        parts.append(f"hits {100 * stats.hit_rate:.0f} % of {stats.expert_demands}")
    if stats.acceptance_rate is not None:
        parts.append(f"accepted {100 * stats.acceptance_rate:.0f} % of {stats.drafted}")
    if stats.computed:
        parts.append(f"{stats.computed} experts computed on the CPU")
    parts.append(f"copied {format_bytes(stats.h2d_bytes)}")
    if stats.stall_s is not None:
        parts.append(f"waited {stats.stall_s:.2f} s")
    _LOG.info("answer ended (%s): %s", reason, ", ".join(parts))


def log_unpackable(name: str, reason: str, *, head: bool = False, form: WeightForm) -> None:
    """A load begins again, with experts, or the output head, in 16 bits; or with those decoded that were to
    stay in FP8, NVFP4 or INT4."""
    if not head and form is not WeightForm.BF12:
        _LOG.warning("the experts of %s do not stay in %s (%s): they are decoded", name, form.shown, reason)
        return
    what, they_are = ("output head", "it is") if head else ("experts", "they are")
    _LOG.warning("the %s of %s cannot be packed (%s): %s loaded in 16 bits", what, name, reason, they_are)


def log_unusable_sampling(name: str) -> None:
    """What generation_config.json says under this name is no value that there is."""
    _LOG.warning("the %s that generation_config.json recommends cannot be used and is left out", name)
