"""Predicted bounds: the formulas against counting, and the directions in which they must move."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from example_models import GIB, GPU, MACHINE, QWEN
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.plan_types import MemoryPlan
from localmoe.hardware.limits import (
    Limits,
    Rates,
    assumed_acceptance,
    distinct_experts,
    measured_rates,
    predict_limits,
    tokens_per_step,
)
from localmoe.hardware.plan import plan_memory

RATES = Rates(device_bytes_per_s=600e9, link_bytes_per_s=25e9)


def plan(budget: int = 16 * GIB, *, drafting: bool = True) -> MemoryPlan:
    return plan_memory(
        QWEN,
        budget_bytes=budget,
        context=4096,
        compute_bytes=2,
        checkpoint_bytes_per_weight=2,
        max_window=9,
        drafting=drafting,
    )


def predict(made: MemoryPlan, rates: Rates = RATES, acceptance: float = 0.9, **options: Any) -> Limits:
    return predict_limits(QWEN, made, rates, compute_bytes=2, acceptance=acceptance, **options)


def test_distinct_experts_are_what_random_routing_gives() -> None:
    generator = random.Random(0)
    counts = []
    for _ in range(4000):
        chosen: set[int] = set()
        for _ in range(5):
            chosen.update(generator.sample(range(60), 4))
        counts.append(len(chosen))
    assert distinct_experts(60, 4, 5) == pytest.approx(sum(counts) / len(counts), rel=0.01)


@given(experts=st.integers(1, 256), tokens=st.integers(1, 100), data=st.data())
def test_distinct_experts_grow_with_tokens_and_stay_within_the_layer(
    experts: int, tokens: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, experts))
    assert distinct_experts(experts, k, 1) == pytest.approx(k)
    here, more = distinct_experts(experts, k, tokens), distinct_experts(experts, k, tokens + 1)
    assert here <= more + 1e-9 and more <= experts + 1e-9 and here <= k * tokens + 1e-9


def test_tokens_a_step_are_what_independent_acceptances_give() -> None:
    generator = random.Random(0)
    total = 0
    for _ in range(20_000):
        accepted = 0
        while accepted < 4 and generator.random() < 0.8:
            accepted += 1
        total += accepted + 1
    assert tokens_per_step(0.8, 4) == pytest.approx(total / 20_000, rel=0.02)
    assert tokens_per_step(1.0, 4) == 5 and tokens_per_step(0.0, 4) == 1 and tokens_per_step(0.5, 0) == 1


def test_plain_decoding_on_demand_is_reading_plus_copying() -> None:
    made = plan()
    limit = predict(made, hit_rate=0.75).on_demand
    read = made.shared_bytes - 151_936 * 2048 * 2 + 24 * 4 * made.slot_bytes
    copied = 24 * 4 * 0.25 * QWEN.expert_bytes
    assert limit.device_bytes_per_token == pytest.approx(read)
    assert limit.link_bytes_per_token == pytest.approx(copied)
    assert limit.tokens_per_s == pytest.approx(1 / (read / 600e9 + copied / 25e9))


def test_an_embedding_is_not_read_wherever_it_lies() -> None:
    made = plan()
    kept = replace(
        made,
        shared_bytes=made.shared_bytes - 2 * QWEN.embedding_params,
        host_embedding_bytes=2 * QWEN.embedding_params,
    )
    assert predict(kept) == predict(made)


def test_the_assumed_hit_rate_is_the_resident_share() -> None:
    made = plan()
    assert predict(made).hit_rate == made.resident_share
    assert predict(made) == predict(made, hit_rate=made.resident_share)


@given(hit_rate=st.floats(0, 1), acceptance=st.floats(0, 1), link=st.floats(1e8, 1e12))
def test_overlap_never_loses_and_at_most_doubles(hit_rate: float, acceptance: float, link: float) -> None:
    limits = predict(plan(), Rates(600e9, link), acceptance, hit_rate=hit_rate)
    ratio = limits.overlapped.tokens_per_s / limits.on_demand.tokens_per_s
    assert 1 - 1e-9 <= ratio <= 2 + 1e-9


@given(low=st.floats(0, 1), high=st.floats(0, 1))
def test_more_hits_and_more_acceptances_never_slow_the_bound(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    made = plan()
    for few, many in (
        (predict(made, hit_rate=low), predict(made, hit_rate=high)),
        (predict(made, acceptance=low), predict(made, acceptance=high)),
    ):
        assert few.speculative is not None and many.speculative is not None
        assert few.speculative.tokens_per_s <= many.speculative.tokens_per_s * (1 + 1e-9)
        assert few.on_demand.tokens_per_s <= many.on_demand.tokens_per_s * (1 + 1e-9)


def test_the_resource_that_binds_is_named() -> None:
    made = plan()
    assert predict(made, Rates(600e9, 1e9), hit_rate=0.5).overlapped.bound_by == "link"
    assert predict(made, hit_rate=1.0).overlapped.bound_by == "device memory"


def test_drafting_pays_where_the_link_binds_and_the_draft_is_good() -> None:
    limits = predict(plan(), acceptance=0.95)
    assert limits.speculative is not None
    assert limits.speculative.tokens_per_s > limits.overlapped.tokens_per_s
    useless = predict(plan(), acceptance=0.0).speculative
    assert useless is not None and useless.draft_length == 1
    assert useless.tokens_per_s < limits.overlapped.tokens_per_s


def test_what_foretells_no_experts_hides_no_copies() -> None:
    made = plan()
    layer = replace(QWEN, draft_model_bytes=500 << 20, draft_model_foretells=False)
    knows = replace(layer, draft_model_foretells=True)
    options = {"compute_bytes": 2, "acceptance": 0.85}
    blind, seeing = (predict_limits(one, made, RATES, **options).speculative for one in (layer, knows))  # type: ignore[arg-type]
    assert blind is not None and seeing is not None and blind.tokens_per_s < seeing.tokens_per_s
    assert assumed_acceptance(layer) < assumed_acceptance(knows) == assumed_acceptance(QWEN)


def test_without_a_draft_there_is_no_speculative_bound() -> None:
    assert predict(plan(drafting=False)).speculative is None


def test_limits_are_labelled_predicted_and_can_be_printed_as_json() -> None:
    printed = json.loads(json.dumps(predict(plan()).as_dict()))
    assert printed["predicted"] is True and printed["speculative"]["bound_by"] in ("link", "device memory")


def test_rates_are_those_measured_on_the_device_asked_for() -> None:
    machine = replace(MACHINE, gpus=(GPU,))
    assert measured_rates(machine, device="cuda") == Rates(600e9, 25e9)
    assert measured_rates(machine, device="cpu") == Rates(40e9, 20e9)
    assert measured_rates(machine, device="cpu", emulated_link_bytes_per_s=2e9) == Rates(40e9, 2e9)


def test_rates_that_were_not_measured_are_not_made_up() -> None:
    unmeasured = replace(MACHINE, gpus=(replace(GPU, h2d_bytes_per_s=None),), memory_copy_bytes_per_s=None)
    assert measured_rates(unmeasured, device="cuda") is None
    assert measured_rates(unmeasured, device="cpu") is None
    assert measured_rates(unmeasured, device="cuda", gpu_index=3) is None
