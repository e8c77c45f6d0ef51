"""The simulator: stories worked out by hand, and a memory of whole passes beside the engine's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from experts.device_rig import RECORD_BYTES, DeviceRig
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    PassRouted,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.expert_counts import demanded_of
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import ModelFootprint
from localmoe.hardware.cards import CARDS, find_card
from localmoe.hardware.limits import Rates
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.optimum import optimal_hits
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.registry import POLICIES
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_machine import predict_machine
from localmoe.prefetch.simulator_passes import PassMemory
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Disk, Machine, Prompt, Window

LAYERS, EXPERTS, TOP_K = 2, 6, 2
# a copy takes 10 s, a draft token 6, a layer 3 and 1 more for each expert
MACHINE = Machine(
    LAYERS, EXPERTS, TOP_K, num_slots=6, expert_bytes=100, copy_s=10.0, draft_token_s=6.0, layer_s=3.0,
    expert_s=1.0, whole_passes=False,
)  # fmt: skip


def tokens(*routing: tuple[tuple[int, int], tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(routing, dtype=np.int32).reshape(len(routing), LAYERS, TOP_K)


def plain(*routing: tuple[tuple[int, int], tuple[int, int]], accepted: int = 0) -> Window:
    """A step without a draft that is routed."""
    return Window(tokens(), np.zeros((0, LAYERS, TOP_K), dtype=np.float32), tokens(*routing), accepted)


def drafted(draft: NDArray[np.int32], target: NDArray[np.int32], accepted: int) -> Window:
    return Window(draft, np.full(draft.shape, 0.5, dtype=np.float32), target, accepted)


@pytest.mark.parametrize("whole", [False, True])
def test_misses_wait_for_their_copies_and_hits_do_not(whole: bool) -> None:
    """Two tokens of the same routing: the first pays for four copies, the second computes."""
    machine = replace(MACHINE, whole_passes=whole)
    once = plain(((0, 1), (2, 3)))
    first = simulate("on-demand", machine, [once])
    # a layer: 3, then two copies; the first expert is computed beside the second copy, the second after it; a
    # kernel that reads over the link computes as it reads
    assert first.counters.decode_s == pytest.approx(2 * (3 + 20) if whole else 2 * (3 + 20 + 1))
    assert (first.counters.hits, first.counters.misses, first.copies) == (0, 4, 4)
    both = simulate("on-demand", machine, [once, once])
    assert both.counters.decode_s - first.counters.decode_s == pytest.approx(2 * (3 + 2))
    assert (both.counters.hits, both.counters.misses, both.copies) == (4, 4, 4)
    assert both.counters.freeze().tpot_s == pytest.approx(both.counters.decode_s / 2)
    assert simulate("on-demand", machine, [once, once], warm_up=1).counters.freeze().hit_rate == 1.0
    assert both.counters.decode_h2d_bytes == 400 and both.counters.freeze().token_hit_rate == 0.5


@pytest.mark.parametrize(("whole", "disk"), [(False, None), (True, None), (False, Disk(6, 100, 10.0))])
def test_what_an_answer_prefetched_is_no_waste_of_the_next_one(whole: bool, disk: Disk | None) -> None:
    """The draft named 5 in both layers, which nobody asks for, and which goes for what later steps ask for:
    wasted in the same answer, and as in an engine not in one that begins meanwhile."""
    machine = replace(MACHINE, draft_token_s=60.0, whole_passes=whole, disk=disk)
    pairs = tokens(((0, 1), (2, 3)), ((0, 1), (2, 3)))
    first = drafted(tokens(((1, 5), (2, 5))), pairs, 1)
    later = [plain((pair, pair)) for pair in ((0, 1), (2, 3), (3, 4), (0, 4))]
    same = simulate("sp-moe", machine, [first, *later]).counters
    assert same.prefetched >= same.wasted == 2
    assert simulate("sp-moe", machine, [first, Prompt(pairs[:1]), *later]).counters.wasted == 0


@pytest.mark.parametrize("whole", [False, True])
def test_what_the_draft_named_counts_as_covered_once_and_only_if_it_was_asked_for(whole: bool) -> None:
    """Nothing is prefetched. Of the four that the first step asks for, the draft named 1 and 2 (and 5 beside
    them). The second step finds 0, 1 and 2 here, and the draft named 4."""
    machine = replace(MACHINE, whole_passes=whole)
    first = drafted(tokens(((1, 5), (2, 5))), tokens(((0, 1), (2, 3)), ((0, 1), (2, 3))), 1)
    second = drafted(tokens(((1, 5), (4, 5))), tokens(((0, 1), (2, 4)), ((0, 1), (2, 4))), 1)
    one = simulate("on-demand", machine, [first]).counters
    assert (one.hits + one.late, one.misses, one.covered) == (0, 4, 2)
    both = simulate("on-demand", machine, [first, second]).counters
    assert (both.hits + both.late, both.covered) == (3, 2 + 4) and both.freeze().coverage_rate == 6 / 8


def test_what_a_draft_foretells_is_copied_while_it_runs() -> None:
    """Two draft tokens of 6 s want experts 0 and 1 of both layers, and so does the target. Layer 0 is known
    after 3 s, so its copies end at 13 and 23, layer 1's at 33 and 43. Verifying layer 0 begins at 12 + 3: one
    is here, the other comes at 23. Layer 1 begins at 24 + 3: one comes at 33, the last at 43, and takes 1
    s."""
    same = tokens(((0, 1), (0, 1)), ((0, 1), (0, 1)))
    window = drafted(same, np.concatenate([same, same[:1]]), 2)
    counters = simulate("moe-speq", MACHINE, [window]).counters
    assert (counters.hits, counters.late, counters.misses, counters.prefetched) == (1, 2, 1, 3)
    assert counters.decode_s == pytest.approx(44) and counters.draft_s == pytest.approx(12)
    assert counters.stall_s == pytest.approx((23 - 16) + (33 - 27) + (43 - 34))
    without = simulate("on-demand", MACHINE, [window]).counters
    assert without.decode_s == pytest.approx(12 + 2 * (3 + 20 + 1))


def test_prompts_fill_slots_and_are_not_counted() -> None:
    for whole in (False, True):
        machine = replace(MACHINE, whole_passes=whole)
        tally = simulate("on-demand", machine, [Prompt(tokens(((0, 1), (2, 3)))), plain(((0, 1), (2, 3)))])
        assert (tally.counters.hits, tally.counters.misses, tally.copies) == (4, 0, 0)
        assert tally.counted == [False, True] and len(tally.demands) == 2


def story_of(seed: int, length: int) -> list[Window]:
    """Windows of sticky routing whose draft is right nine times of ten."""
    settings = SyntheticSettings(parse_routing("sticky:0.5"), 0.7, 0.9, seed)
    model = SyntheticModel(settings, LAYERS, EXPERTS, TOP_K)
    made = windows(model, draft_length=length, answers=1, prompt_tokens=0, new_tokens=60)
    return [part for part in made if isinstance(part, Window)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_slots", [3, 8])
def test_the_simulated_memory_of_whole_passes_does_what_the_engines_does(policy: str, num_slots: int) -> None:
    """Copies that take no time, on the engine's own memory and its plain kernels: the same experts in slots
    after every step, the same hits, copies and waste."""
    rig = DeviceRig(num_slots, layers=LAYERS, experts=EXPERTS)
    shape = CacheShape(LAYERS, EXPERTS, TOP_K, num_slots)
    real, ours = Scheduler(POLICIES[policy](shape)), Scheduler(POLICIES[policy](shape))
    machine = replace(MACHINE, num_slots=num_slots, copy_s=0.0, whole_passes=True)
    memory = PassMemory(machine, ours)
    rig.memory._scores = real.keep_scores
    real.attach(rig.memory)
    ours.attach(memory)
    for number, window in enumerate(story_of(num_slots, 3)):
        for scheduler, pump in ((real, rig.memory.pump), (ours, memory.pump)):
            scheduler.notify(StepStarted(number, window.drafted))
            for token, (experts, confidences) in enumerate(
                zip(window.draft, window.confidences, strict=True)
            ):
                scheduler.notify(TokenRouted(token, experts, confidences))
                pump()
                memory.advance(0.0)
            scheduler.notify(DraftFinished(window.drafted))
        rig.memory.open_pass()
        index = window.target.transpose(1, 0, 2).tolist()
        report = rig.memory.close_pass(rig.play(index, len(window.target))[0])
        demanded = demanded_of(window.target, EXPERTS)
        hits, late = memory.run_pass(demanded)
        for scheduler in (real, ours):
            scheduler.notify(PassRouted(demanded))
            scheduler.notify(StepFinished(window.drafted, window.accepted))
        assert np.array_equal(report.demanded, demanded) and not late.any()
        assert np.array_equal(report.hits, hits), number
        assert np.array_equal(rig.memory.residency(), memory.residency()), number
        counters = rig.memory.counters()
        found = (counters.h2d_bytes // RECORD_BYTES, counters.prefetched, counters.wasted)
        assert found == (memory.copies, memory.prefetched, memory.wasted)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_few_slots_serve_every_demand_layer_by_layer(policy: str) -> None:
    """Three slots for windows that want more: every demand is met, each miss by a copy, and nothing stays
    locked."""
    story = story_of(7, 3)
    tally = simulate(policy, replace(MACHINE, num_slots=3), story)
    asked = sum(int(demanded_of(window.target, EXPERTS).sum()) for window in story)
    assert tally.num_demands == asked == sum(int(demands.sum()) for demands in tally.demands)
    assert tally.copies >= tally.counters.misses > 0 and tally.counters.steps == len(story)
    assert tally.counters.decode_s > tally.copies * MACHINE.copy_s * 0.9 - MACHINE.copy_s
    best = optimal_hits(tally.demands, 3, whole_steps=False)
    assert tally.num_demands - tally.copies <= best, "nobody reuses more than the optimum"


def test_copies_that_a_layer_cannot_wait_for_share_the_link_with_what_it_reads_itself() -> None:
    """Two copies of 10 s are issued, and a layer reads 5 s' worth over the link itself: at half speed, so
    that it takes 10 s and the first copy has 5 s left."""
    scheduler = Scheduler(POLICIES["on-demand"](CacheShape(LAYERS, EXPERTS, TOP_K, 6)))
    memory = PassMemory(replace(MACHINE, whole_passes=True), scheduler)
    scheduler.attach(memory)
    memory.prefetch((0, 0), 0.0)  # type: ignore[arg-type]
    memory.prefetch((0, 1), 0.0)  # type: ignore[arg-type]
    memory.pump()
    memory._read_over_link(5.0)
    assert memory.now == pytest.approx(10.0)
    memory.advance(4.9)
    assert memory._running[0, :2].all()
    memory.advance(0.2)
    assert memory._running[0, :2].tolist() == [False, True]
    memory._read_over_link(20.0)
    assert memory.now == pytest.approx(15.1 + 2 * 9.9 + 10.1), "alone once the copies are complete"


def test_a_window_is_the_models_own_routing_and_ends_where_the_answer_does() -> None:
    settings = SyntheticSettings(parse_routing("sticky:0.5"), 0.7, 0.9, 5)
    model = SyntheticModel(settings, LAYERS, EXPERTS, TOP_K)
    made = list(windows(model, draft_length=3, answers=2, prompt_tokens=4, new_tokens=10, gate_accuracy=1.0))
    position, answer = 0, -1
    for part in made:
        if isinstance(part, Prompt):
            assert answer < 0 or position == 14
            answer, position = answer + 1, 4
            model.begin(answer)
            assert np.array_equal(part.target, model.target_window(0, 4))
            continue
        assert np.array_equal(part.target, model.target_window(position, part.drafted + 1))
        assert np.array_equal(part.draft, model.draft_window(position, part.drafted)[: part.drafted])
        assert np.array_equal(part.guesses, part.target)
        assert part.accepted <= part.drafted == min(3, 14 - position - 1)
        position += part.accepted + 1
    assert answer == 1 and position == 14
    blind = windows(model, draft_length=3, answers=1, prompt_tokens=4, new_tokens=10, self_draft=False)
    assert all(len(part.draft) == 0 for part in blind if isinstance(part, Window))


def test_predicted_passes_are_those_measured_on_an_h200_within_a_fifth() -> None:
    """Qwen1.5-MoE-A2.7B there: a draft token 1.725 ms, verifying one token 2.474 ms, nine (662 experts)
    5.022."""
    expert = 3 * 2048 * 1408
    shared = 14_315_784_192 - 24 * 60 * expert
    footprint = ModelFootprint(
        "qwen", "qwen2_moe", 24, 60, 4, expert, 2 * expert, shared, 2 * shared, 196608,
        expert // 2 + expert // 32, 8192, 2048, 151936, True, embedding_params=151936 * 2048,
    )  # fmt: skip
    machine = predict_machine(footprint, 1440, Rates(4.4e12, 55e9))
    assert machine.draft_token_s == pytest.approx(1.725e-3, rel=0.2)
    for distinct, measured in ((96, 2.474e-3), (662, 5.022e-3)):
        predicted = 24 * machine.layer_s + distinct * machine.expert_s
        assert predicted == pytest.approx(measured, rel=0.2)
    assert machine.copy_s == pytest.approx(2 * expert / 55e9) and machine.num_slots == 1440


def test_layers_of_packed_experts_take_what_was_measured_on_an_h100() -> None:
    """Qwen1.5-MoE-A2.7B's there, all in VRAM: one token (4 experts) 41.7 us, nine (28) 163.7, 64 (59) 317.
    Its memory reads 3.35 TB/s by the data sheet."""
    expert = 3 * 2048 * 1408
    plain = ModelFootprint(
        "qwen", "qwen2_moe", 24, 60, 4, expert, 2 * expert, 10**9, 2 * 10**9, 196608, expert // 2, 8192, 2048,
        151936, True, bf12_expert_bytes=13_176_832,
    )  # fmt: skip
    rates = Rates(3.35e12, 55e9)
    beside = predict_machine(plain, 1440, rates).layer_s
    packed = predict_machine(plain.in_codes(), 1440, rates)
    for distinct, measured in ((4, 41.7e-6), (28, 163.7e-6), (59, 317e-6)):
        assert packed.layer_s - beside + distinct * packed.expert_s == pytest.approx(measured, rel=0.05)


def test_a_packed_head_is_read_in_less_time_where_passes_run_whole() -> None:
    plain = ModelFootprint(
        "qwen", "qwen2_moe", 24, 60, 4, 1000, 2000, 10**9, 2 * 10**9, 196608, 500, 8192, 2048, 151936, True,
        head_saved_bytes=150_000_000,
    )  # fmt: skip
    rates = Rates(1e12, 55e9)
    for whole in (True, False):
        one, other = (predict_machine(m, 9, rates, whole_passes=whole) for m in (plain, plain.in_codes()))
        saved_s = 150_000_000 / (0.8 * 1e12) if whole else 0.0
        assert one.draft_token_s - other.draft_token_s == pytest.approx(saved_s)
        assert one.layer_s - other.layer_s == pytest.approx(saved_s / 24)


def test_cards_are_found_by_name_and_leave_a_reserve() -> None:
    assert find_card("rtx-4060").rates.link_bytes_per_s == pytest.approx(12.6e9, rel=0.01)
    assert find_card("rtx-4090").rates.link_bytes_per_s == pytest.approx(25.2e9, rel=0.01)
    assert [card.memory_bytes >> 30 for card in CARDS.values()] == [8, 12, 12, 16, 16, 16, 16, 24, 24, 32]
    assert all(0.9 * card.memory_bytes < card.budget_bytes < card.memory_bytes for card in CARDS.values())
