"""The simulator beside real answers: the same routing and acceptance give the same hits. (How long they take
is compared by benchmarks/simulator_check.py, since other programs disturb a machine.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import load_with_slots
from support.recorded_runs import machine_of, record_run

from localmoe.core.config import GenerationRequest
from localmoe.prefetch.simulator import simulate

SLOTS, LINK = 12, 200e6  # of 24 experts; about 1 ms an expert
PROMPTS = ("Once upon a time there was", "The answer to the question is")


@pytest.mark.parametrize(
    ("policy", "draft_length", "points"),
    # idle they differ by less than a point; on a busy machine copies are claimed before or after a hit
    # is read, which changes victims, and what moe-speq brings in time depends on speed altogether
    [("on-demand", 0, 0.06), ("on-demand", 4, 0.06), ("moe-speq", 0, 0.06), ("moe-speq", 4, 0.25)],
)
def test_a_recorded_answer_is_simulated_with_the_same_hits(
    policy: str, draft_length: int, points: float, tiny: Callable[[str], tuple[Path, Any]]
) -> None:
    with load_with_slots(tiny("qwen2_moe")[0], SLOTS, emulated_link_bytes_per_s=LINK) as engine:
        requests = [
            GenerationRequest(prompt=text, max_new_tokens=24, policy=policy, draft_length=draft_length)
            for text in PROMPTS
        ]
        run, stats = record_run(engine, requests)
        machine = machine_of(engine, run, stats, SLOTS)
    tally = simulate(policy, machine, run.story)
    found = tally.counters
    assert found.steps == sum(s.steps for s in stats)
    assert (found.drafted, found.accepted) == (sum(s.drafted for s in stats), sum(s.accepted for s in stats))
    assert tally.num_demands == sum(s.expert_demands for s in stats) > 100
    real = sum(s.hits for s in stats) / tally.num_demands
    assert found.hits / tally.num_demands == pytest.approx(real, abs=points)
    assert machine.copy_s >= 0.95 * machine.expert_bytes / LINK
    if policy == "on-demand":
        assert tally.copies == pytest.approx(found.misses) and found.late == 0
