"""With an emulated link copies take their time, the label says so, and looking ahead finds more in slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engines import ROOMY, ask, load_with_slots, memory_of, runner_of, wait_until_idle

from localmoe.core.config import EngineConfig
from localmoe.core.events import DraftFinished, Event
from localmoe.core.stats import GenerationStats
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine

Tiny = Callable[[str], tuple[Path, Any]]
LINK = 40e6  # bytes a second: about 5 ms an expert of 192 KiB
PROMPT = "Once upon a time there was"


@contextmanager
def settled_before_verify(engine: Engine) -> Iterator[None]:
    """Let every prefetch that can start arrive before the target runs, so that no count depends on speed."""
    scheduler = runner_of(engine).passes.scheduler
    notify = scheduler.notify

    def notify_and_settle(event: Event) -> None:
        notify(event)
        if isinstance(event, DraftFinished):
            wait_until_idle(memory_of(engine))

    scheduler.notify = notify_and_settle
    try:
        yield
    finally:
        scheduler.notify = notify


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral", "gpt_oss"])
def test_moe_speq_finds_more_experts_in_slots_than_on_demand_at_the_same_budget_and_draft_length(
    architecture: str, tiny: Tiny
) -> None:
    found: dict[str, GenerationStats] = {}
    tokens: dict[str, list[int]] = {}
    for policy in ("on-demand", "moe-speq"):
        with (
            load_with_slots(tiny(architecture)[0], 12, policy=policy) as engine,
            settled_before_verify(engine),
        ):
            answer = ask(engine, PROMPT, 32, draft_length=4)
            found[policy], tokens[policy] = answer.stats, answer.tokens
    on_demand, moe_speq = found["on-demand"], found["moe-speq"]
    assert tokens["on-demand"] == tokens["moe-speq"]
    assert on_demand.expert_demands == moe_speq.expert_demands, "the same steps ran"
    assert on_demand.hit_rate is not None and moe_speq.hit_rate is not None
    print(f"{architecture}: hit rate {on_demand.hit_rate:.3f} on-demand, {moe_speq.hit_rate:.3f} moe-speq")
    assert moe_speq.hit_rate > on_demand.hit_rate + 0.1
    assert moe_speq.misses + moe_speq.late < 0.8 * on_demand.misses
    assert moe_speq.prefetched > 0 and on_demand.prefetched == 0


def test_an_emulated_link_is_named_as_such_and_copies_take_at_least_their_time(tiny: Tiny) -> None:
    with load_with_slots(tiny("qwen2_moe")[0], 3, emulated_link_bytes_per_s=LINK) as engine:
        assert engine.info().link == "emulated 40.0 MB/s"
        stats = ask(engine, PROMPT, 8, policy="on-demand", draft_length=0).stats
    decode_bytes = stats.h2d_bytes - stats.prefill_h2d_bytes
    assert decode_bytes > 0 and stats.tpot_s is not None
    assert stats.tpot_s * (stats.new_tokens - 1) >= 0.95 * decode_bytes / LINK
    assert stats.ttft_s >= 0.95 * stats.prefill_h2d_bytes / LINK
    assert 0.2 * decode_bytes / LINK < stats.stall_s <= stats.verify_s, "nothing else could be waited for"


def test_without_an_emulated_link_the_label_says_what_copies_are(tiny: Tiny) -> None:
    with Engine.load(
        str(tiny("qwen2_moe")[0]), EngineConfig(vram_budget_bytes=ROOMY, draft_length=0)
    ) as engine:
        assert engine.info().link == "memory copy"
        ask(engine, PROMPT)
        assert ask(engine, PROMPT).stats.stall_s == 0.0, "all experts are resident"


def test_what_one_answer_prefetched_in_vain_is_not_told_of_the_next(tiny: Tiny) -> None:
    with load_with_slots(tiny("qwen2_moe")[0], 6) as engine:
        memory = memory_of(engine)
        for expert in range(6):  # as an answer does in its last step; layer 0 evicts them
            memory.prefetch(ExpertKey(1, expert), 0.0)
        wait_until_idle(memory)
        stats = ask(engine, PROMPT, 16, draft_length=0, policy="on-demand").stats
        assert (stats.prefetched, stats.wasted) == (0, 0)
        assert len(memory.resident_keys()) == 6
