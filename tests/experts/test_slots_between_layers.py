"""Which layers have the slots: after long prompts, in passes each behind another, slots hold as much of what
the next token asks for as if they had been spread from the first."""

from __future__ import annotations

import numpy as np
import pytest
from experts.device_rig import DeviceRig
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.prefill_stream import PrefillStream
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import CacheShape, Policy
from localmoe.prefetch.scheduler import Scheduler

LAYERS, EXPERTS, TOP_K, TOKENS = 6, 24, 4, 60
STAYS = 0.5  # chance that an expert is asked for by the next token too


def routing(seed: int) -> list[list[list[int]]]:
    """[token][layer][k]."""
    chance = np.random.default_rng(seed)
    last = [chance.permutation(EXPERTS)[:TOP_K].tolist() for _ in range(LAYERS)]
    tokens = []
    for _ in range(TOKENS):
        for layer, experts in enumerate(last):
            stay = [expert for expert in experts if chance.random() < STAYS]
            others = [expert for expert in range(EXPERTS) if expert not in stay]
            last[layer] = stay + chance.permutation(others)[: TOP_K - len(stay)].tolist()
        tokens.append([list(experts) for experts in last])
    return tokens


def prompt(rig: DeviceRig) -> None:
    """A long one, which asks for every expert."""
    stream = PrefillStream(rig.memory)
    for layer in range(LAYERS):
        for _ in stream.bring(layer, stream.plan(layer)):
            pass
    stream.close()
    rig.memory.note_use(np.ones((LAYERS, EXPERTS), dtype=np.bool_))


def answer(rig: DeviceRig, tokens: list[list[list[int]]]) -> int:
    """Hits of passes of one token, each but the first behind another."""
    hits, log = 0, None
    for experts in tokens:
        if log is None:
            rig.memory.open_pass()
        else:
            rig.memory.open_behind()
        following: NDArray[np.int32] = rig.play([[chosen] for chosen in experts], 1)[0]
        if log is not None:
            hits += int(rig.memory.close_pass(log).hits.sum())
        log = following
    assert log is not None
    return hits + int(rig.memory.close_pass(log).hits.sum())


def spread_and_known(num_slots: int, tokens: list[list[list[int]]]) -> int:
    """Hits of an LRU a layer whose slots are spread, where each pass knows all before it."""
    hits = 0
    slots = [num_slots // LAYERS + (layer < num_slots % LAYERS) for layer in range(LAYERS)]
    held: list[list[int]] = [[] for _ in range(LAYERS)]  # the least recently used first
    for experts in tokens:
        for layer, chosen in enumerate(experts):
            hits += len(set(chosen) & set(held[layer]))
            unasked = [expert for expert in held[layer] if expert not in chosen]
            asked = [expert for expert in held[layer] if expert in chosen]
            missing = sorted(set(chosen) - set(asked))
            room = slots[layer] - len(asked)
            new = missing[:room]
            held[layer] = unasked[len(unasked) - (room - len(new)) :] + asked + new if room else asked
    return hits


@pytest.mark.parametrize("policy", [OnDemandPolicy, MoeSpeqPolicy])
@pytest.mark.parametrize(
    "num_slots", [pytest.param(8, marks=pytest.mark.slow), 14, pytest.param(30, marks=pytest.mark.slow)]
)
def test_slots_are_spread_however_many_prompts_went_before(num_slots: int, policy: type[Policy]) -> None:
    rig = DeviceRig(num_slots, layers=LAYERS, experts=EXPERTS)
    scheduler = Scheduler(policy(CacheShape(LAYERS, EXPERTS, TOP_K, num_slots)))
    rig.memory._scores = scheduler.keep_scores
    scheduler.attach(rig.memory)
    for seed in range(3):
        prompt(rig)
        rig.check()
        tokens = routing(seed)
        assert answer(rig, tokens) > 0.93 * spread_and_known(num_slots, tokens)
        held = rig.memory.held()
        assert held.sum() == num_slots and held.max() - held.min() <= 1
        rig.check()


def test_what_a_layer_may_hold_by_its_share_stays_after_a_prompt() -> None:
    rig = DeviceRig(LAYERS * EXPERTS, layers=LAYERS, experts=EXPERTS)
    prompt(rig)
    assert len(rig.resident) >= LAYERS * EXPERTS - LAYERS
    prompt(rig)
    rig.check()
    for layer in range(LAYERS):
        rig.memory.open_pass()
        log, _ = rig.play([[list(range(EXPERTS))] if layer == at else [[-1]] for at in range(LAYERS)], 1)
        rig.memory.close_pass(log)
    assert rig.resident == {ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
