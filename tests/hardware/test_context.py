"""The context where none is named: at least the usual one, and what more it takes of the memory is little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_models import GIB, QWEN, footprints
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.config import LONGEST_UNASKED
from localmoe.core.errors import BudgetError, ConfigError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.hardware.context import check_context, unasked_context, usual_context
from localmoe.hardware.needs import device_needs
from localmoe.hardware.plan import plan_memory

OPTIONS: Any = {
    "compute_bytes": 2, "checkpoint_bytes_per_weight": 2, "max_window": 80, "whole_passes": True,
}  # fmt: skip
LATENT = replace(QWEN, kv_bytes_per_token=27 * 576 * 2, max_context=163_840)  # DeepSeek-V2-Lite's attention


@given(
    model=footprints(), budget=st.integers(1, 2**40), limit=st.integers(16, 2**20), drafting=st.booleans(),
    whole=st.booleans(),
)  # fmt: skip
def test_it_takes_a_24th_of_the_memory_or_what_lies_idle_and_nothing_that_the_usual_one_leaves_a_draft(
    model: ModelFootprint, budget: int, limit: int, drafting: bool, whole: bool
) -> None:
    model = replace(model, max_context=limit)
    options = {**OPTIONS, "whole_passes": whole}
    context = unasked_context(model, budget, options, drafting=drafting)
    usual = usual_context(model)
    assert usual == min(4096, limit) <= context <= min(32_768, limit)

    def divided(tokens: int) -> MemoryPlan | None:
        try:
            return plan_memory(model, budget_bytes=budget, context=tokens, drafting=drafting, **options)
        except BudgetError:
            return None

    before, after = divided(usual), divided(context)
    assert (before is None) == (after is None)
    if before is None or after is None:
        assert context == usual
        return
    assert after.drafting == before.drafting
    fixed = [made.total_bytes - made.num_slots * made.slot_bytes for made in (before, after)]
    idle = budget - before.total_bytes if whole and before.num_slots == model.total_experts else 0
    assert fixed[1] - fixed[0] <= max(budget // 24, idle)
    longer = min(2 * context, LONGEST_UNASKED, limit)
    if longer > context:  # and it is the longest of those
        needs = device_needs(model, context=longer, **options)
        too_much = needs.fixed_bytes(drafting=before.drafting) - fixed[0] > max(budget // 24, idle)
        assert too_much or needs.least_bytes(drafting=before.drafting) > budget


@pytest.mark.parametrize(
    ("model", "gib", "context"),
    [
        (QWEN, 16, 4096),  # 192 KiB a token
        (QWEN, 24, 8192),  # which is all that it was made for
        (replace(QWEN, max_context=131_072), 24, 8192),
        (replace(QWEN, max_context=131_072), 36, 32_768),  # beside all experts
        (LATENT, 8, 8192),
        (LATENT, 16, 16_384),
        (LATENT, 32, 32_768),
        (replace(LATENT, trained_context=4096), 32, 4096),  # longer ones change what short texts get
        (replace(LATENT, trained_context=10_000), 32, 10_000),
        (replace(LATENT, trained_context=1000), 32, 4096),
        (replace(LATENT, max_context=2048), 32, 2048),
        (replace(LATENT, max_context=5000), 32, 5000),
    ],
)
def test_it_is_longer_the_less_a_token_takes_and_the_more_memory_there_is(
    model: ModelFootprint, gib: int, context: int
) -> None:
    assert unasked_context(model, gib * GIB, OPTIONS, drafting=False) == context


def test_keys_and_values_that_would_lie_aside_in_host_ram_need_their_room_there() -> None:
    """A layer with a sliding window keeps a copy in RAM of what its ring overwrites."""
    model = replace(LATENT, sliding_kv_bytes_per_token=27 * 576 * 2, sliding_window=4096)
    whole = device_needs(model, context=32_768, **OPTIONS).host_bytes
    assert whole > device_needs(model, context=4096, **OPTIONS).host_bytes
    for host, context in ((None, 32_768), (whole, 32_768), (whole - 1, 4096)):
        assert unasked_context(model, 32 * GIB, OPTIONS, drafting=False, host_bytes=host) == context


def test_more_than_the_model_was_made_for_is_refused_with_what_it_was() -> None:
    check_context(8192, QWEN)
    check_context(None, QWEN)
    with pytest.raises(ConfigError, match="made for at most 8192 tokens of context, not 8193: use 8192 or"):
        check_context(8193, QWEN)
