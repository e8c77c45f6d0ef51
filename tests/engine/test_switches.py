"""Optimisations switched off: the same tokens, and none of what was switched off happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import ask, check_consistent, check_stats, load_with_slots, memory_of, runner_of

from localmoe.core.events import DraftFinished, Event
from localmoe.core.switches import Switches
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.experts.link import Link
from localmoe.experts.slots import DeviceSlots
from localmoe.kernels import lowbit_linear

Tiny = Callable[[str], tuple[Path, Any]]
PROMPT = "Once upon a time there was"
OFF = (
    Switches(),
    Switches(copies_beside=False),
    Switches(layer_batches=True),
    Switches(fused_draft=False),
    Switches(whole_window=True),
    Switches(copies_beside=False, layer_batches=True, fused_draft=False),
)


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[Engine]:
    with load_with_slots(tiny("qwen2_moe")[0], 12, emulated_link_bytes_per_s=400e6) as engine:
        yield engine


def test_no_switch_changes_the_answer(engine: Engine) -> None:
    for policy in ("moe-speq", "sp-moe@1", "single-later", "adapmoe"):
        found = []
        for switches in OFF:
            engine.reset()
            answer = ask(engine, PROMPT, 14, draft_length=3, policy=policy, switches=switches)
            check_stats(answer)
            check_consistent(engine)
            assert answer.stats.drafted and answer.stats.prefetched, (policy, switches)
            found.append(answer.tokens)
        assert all(tokens == found[0] for tokens in found), policy


def test_nothing_is_copied_ahead_of_need_while_the_model_computes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    memory, policy_thread = memory_of(engine), []
    linear = lowbit_linear.LowBitLinear.__call__

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        with memory.lock:
            policy_thread.append(bool(memory._table._loading) or len(memory._queue) > 0)
        return linear(self, x)

    monkeypatch.setattr(lowbit_linear.LowBitLinear, "__call__", watched)
    for beside in (False, True):
        policy_thread.clear()
        stats = ask(
            engine, PROMPT, 14, draft_length=3, policy="sp-moe@1", switches=Switches(copies_beside=beside)
        ).stats
        assert any(policy_thread) == beside, "a draft product ran while a copy did"
        assert stats.prefetched
        assert beside or stats.late == 0


def test_a_layers_prefetches_become_readable_together(engine: Engine) -> None:
    memory = memory_of(engine)
    engine.reset()
    memory = memory_of(engine)
    held: list[int] = []

    class Watching:
        def __init__(self, link: Link) -> None:
            self.link = link

        def copy(self, record: torch.Tensor, slots: DeviceSlots, slot: int) -> None:
            with memory.lock:
                held.append(len(memory.resident_keys()))
            self.link.copy(record, slots, slot)

        def after_read(self, slot: int) -> None:
            self.link.after_read(slot)

    link, memory.link = memory.link, Watching(memory.link)
    try:
        for batches in (True, False):
            memory.layer_batches, first = batches, len(memory.resident_keys())
            held.clear()
            with memory.lock:
                for expert in range(4):
                    memory.prefetch(ExpertKey(int(not batches), expert), 0.0)
            memory.settle()
            assert held == [first + (0 if batches else n) for n in range(4)]
            assert len(memory.resident_keys()) == first + 4
    finally:
        memory.link, memory.layer_batches = link, False


def test_settling_withdraws_what_finds_no_slot(tiny: Tiny) -> None:
    with load_with_slots(tiny("mixtral")[0], 8) as engine:
        memory = memory_of(engine)
        for layer in (0, 1):
            for expert in range(8):
                memory.prefetch(ExpertKey(layer, expert), float(layer))
        memory.settle()
        assert len(memory.resident_keys()) == 8 and not len(memory._queue)
        memory.close()
        memory.settle()  # a closed memory is waited for by nobody


def test_the_draft_multiplies_without_its_fused_kernel_and_with_it_again(engine: Engine) -> None:
    passes = runner_of(engine).passes
    for fused in (True, False, True):
        ask(engine, PROMPT, 4, draft_length=2, switches=Switches(fused_draft=fused))
        assert passes.draft is not None
        assert {expert.gate_up.fused for layer in passes.draft for expert in layer} == {fused}
    ask(engine, PROMPT, 4, draft_length=2)
    assert passes.draft[0][0].down.fused


def test_the_routing_of_the_whole_window_is_foretold_where_the_draft_runs_its_last_token(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few slots that what is there does not depend on when copies end."""
    with load_with_slots(tiny("qwen2_moe")[0], 5) as engine:
        passes, foretold, coverage = runner_of(engine).passes, [], []
        notify = passes.scheduler.notify

        def watched(event: Event) -> None:
            if isinstance(event, DraftFinished):
                foretold.append(passes.lookahead.num_tokens - event.drafted)
            notify(event)

        monkeypatch.setattr(passes.scheduler, "notify", watched)
        for whole in (False, True):
            foretold.clear()
            engine.reset()
            stats = ask(
                engine, PROMPT, 40, draft_length=3, policy="on-demand", switches=Switches(whole_window=whole)
            ).stats
            assert len(foretold) > 5 and set(foretold) == {int(whole)}
            coverage.append(stats.coverage_rate or 0.0)
    assert coverage[1] > coverage[0] + 0.02
