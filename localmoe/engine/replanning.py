"""The plan of another budget for a model that is loaded, or of another configuration. Divides nothing; see
planning."""

from __future__ import annotations

from dataclasses import replace

from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.units import format_bytes, size_at_most
from localmoe.engine.planning import PreparedModel, divide_memory
from localmoe.hardware.ram_experts import ram_bytes


def replan(prepared: PreparedModel, old: MemoryPlan, config: EngineConfig, held_bytes: int) -> MemoryPlan:
    """The plan of another budget for a model that is loaded after `old`; context and draft stay.

    Args:
        held_bytes: see `divide_memory`.

    Raises:
        BudgetError: what is loaded does not fit.
    """
    length = config.draft_length
    if not old.drafting:
        length = 0
    elif length == "auto":
        length = 1  # the loaded draft stays, so the plan must hold it
    config = replace(config, context=old.context, draft_length=length)
    if not old.disk_bytes:
        return replace(plan_anew(prepared, config, held_bytes), drafting_reason=old.drafting_reason)
    held = ram_bytes(prepared.footprint, old.ram_experts)  # which stays as it is
    plan = plan_anew(prepared, replace(config, ram_budget_bytes=held), held_bytes)
    lacking = held - ram_bytes(prepared.footprint, plan.ram_experts)
    if plan.ram_experts and lacking > 0 and plan.total_bytes > old.total_bytes:
        most = max(old.total_bytes, plan.total_bytes - lacking)
        raise BudgetError(
            f"With a memory budget of {format_bytes(plan.budget_bytes)} the {format_bytes(held)} of experts "
            f"that RAM holds would not fit beside it: give a budget of at most {size_at_most(most)}, or load "
            "the model again.",
            budget_bytes=most,
        )
    return replace(
        plan, ram_experts=old.ram_experts, host_bytes=old.host_bytes, drafting_reason=old.drafting_reason
    )


def plan_anew(prepared: PreparedModel, config: EngineConfig, held_bytes: int | None) -> MemoryPlan:
    """The plan of a configuration, as for a load, but with experts where they lie now; see `divide_memory`.

    Raises:
        BudgetError: it does not fit.
    """
    stored_bytes, has_draft = prepared.source.stored_dtype.itemsize, prepared.source.has_draft()
    return divide_memory(
        prepared.footprint, config, prepared.compute, stored_bytes, held_bytes=held_bytes, has_draft=has_draft
    )
