"""Simulated passes beside which a CPU computes experts: divided so that both lanes end together, and what
both had a part in comes into slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefetch.test_simulator import EXPERTS, LAYERS, MACHINE, TOP_K, plain, story_of

from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch import simulator_lanes
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.registry import POLICIES
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_lanes import LaneMemory, divide
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Lane

WHOLE = replace(MACHINE, whole_passes=True)  # a copy 10 s, a layer 3, an expert 1
SECONDS = st.floats(0.1, 10)


def memory_with(lane: Lane) -> LaneMemory:
    scheduler = Scheduler(POLICIES["on-demand"](CacheShape(LAYERS, EXPERTS, TOP_K, WHOLE.num_slots)))
    memory = LaneMemory(WHOLE, scheduler, lane)
    scheduler.attach(memory, copies=lambda: memory.copies)
    return memory


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12), SECONDS, SECONDS, st.floats(0, 1), st.floats(0, 5),
    st.floats(0, 20),
)  # fmt: skip
def test_both_lanes_end_together(
    counts: list[int], copy_s: float, first_s: float, further: float, handover_s: float, busy_s: float
) -> None:
    counts = sorted(counts)
    lane = Lane(first_s, further * first_s, handover_s)
    shares = divide(counts, copy_s, lane, busy_s)
    assert sorted(shares, reverse=True) == shares and sum(0 < share < 1 for share in shares) <= 1
    costs = [lane.seconds(count) for count in counts]
    cpu_s = handover_s + sum(share * cost for share, cost in zip(shares, costs, strict=True))
    link_s = busy_s + sum(1 - share for share in shares) * copy_s
    part_s = (max(costs) + copy_s) / 20  # half of one is a part's rounding
    if shares[0] == 0.0:
        assert cpu_s > link_s - part_s, "the CPU could not have begun before the link is done"
    elif shares[-1] == 1.0:
        assert cpu_s < link_s + part_s, "the link could not have begun before the CPU is done"
    else:
        assert cpu_s == pytest.approx(link_s, abs=part_s)


def test_what_both_have_a_part_in_comes_into_slots_and_holds_the_link_up() -> None:
    """The CPU is as fast as the link: each takes 5 s of an expert, then the other 5 s of it follow; 3 of them
    while the next layer's attention runs. There the link has 2 s and the CPU more of the expert."""
    memory = memory_with(Lane(10.0, 0.0, 0.0))
    tokens = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
    tokens[0, 1] = tokens[1, 4] = 1
    hits, late = memory.run_pass(tokens)
    assert not hits.any() and not late.any() and not memory.computed.any()
    apart_s = 2 * simulator_lanes._APART_S
    assert memory.now == pytest.approx(3 + 5 + 3 + 6 + 6 + apart_s)  # the pass ends with what it owes
    assert memory.stall_s == pytest.approx(5 + 6 + apart_s) and memory.cpu_busy_s == pytest.approx(5 + 6)
    assert memory.copies == pytest.approx(2)
    assert memory.residency()[0].nonzero()[0].tolist() == [1]
    assert memory.residency()[1].nonzero()[0].tolist() == [4]
    assert memory.run_pass(tokens)[0].sum() == 2


def test_what_the_cpu_computes_all_of_enters_no_slot() -> None:
    memory = memory_with(Lane(1e-9, 0.0, 0.0))
    tokens = np.ones((LAYERS, EXPERTS), dtype=np.int64)
    for _ in range(3):
        hits, _ = memory.run_pass(tokens)
        assert not hits.any() and memory.computed.all() and memory.copies == 0
    assert memory.now == pytest.approx(3 * LAYERS * WHOLE.layer_s), "nothing is read from VRAM"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("length", [0, 3])
def test_a_cpu_that_does_not_pay_changes_nothing(policy: str, length: int) -> None:
    story = story_of(3, length)
    plain_tally = simulate(policy, WHOLE, story)
    tally = simulate(policy, replace(WHOLE, lane=Lane(1.0, 0.0, 1e9)), story)
    assert tally.counters == plain_tally.counters and tally.copies == pytest.approx(plain_tally.copies)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_demand_is_met_one_way_or_another_and_a_faster_cpu_is_faster(policy: str) -> None:
    times = []
    for first_s in (40.0, 10.0, 2.5):
        story = [*story_of(5, 3), plain(((0, 1), (2, 3)))]
        tally = simulate(policy, replace(WHOLE, lane=Lane(first_s, 0.1 * first_s, 0.0)), story)
        assert tally.num_demands == sum(int(demands.sum()) for demands in tally.demands)
        times.append(tally.counters.decode_s)
    assert times[0] > times[1] > times[2] and tally.counters.computed > 0


@pytest.mark.parametrize(("sticky", "faster"), [(0.95, False), (0.3, True)])
def test_passes_of_one_token_do_without_a_cpu_that_makes_them_slower(sticky: float, faster: bool) -> None:
    """What it computes all of enters no slot, so what stays is missing again."""
    machine = replace(WHOLE, num_slots=LAYERS * EXPERTS // 2, copy_s=1.0, layer_s=0.1, expert_s=0.01)
    settings = SyntheticSettings(parse_routing(f"sticky:{sticky}"), 1.0, 1.0)
    model = SyntheticModel(settings, LAYERS, EXPERTS, TOP_K)
    story = list(windows(model, draft_length=0, answers=1, prompt_tokens=0, new_tokens=900))
    lane = Lane(0.5, 0.0, 0.1)
    took = [
        simulate("on-demand", replace(machine, lane=one), story, warm_up=300).counters.decode_s
        for one in (None, replace(lane, always=True), lane)
    ]
    assert (took[1] < 0.95 * took[0]) == faster
    assert took[2] < 1.05 * min(took[:2])
