"""Engines for tests: budgets for a number of experts, answers as token lists, links that count and fail."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.stats import GenerationStats
from localmoe.core.stream import StreamEvent
from localmoe.core.types import Message
from localmoe.engine import Engine, plan_model
from localmoe.experts.link import Link
from localmoe.experts.memory import ExpertMemory
from localmoe.experts.slots import DeviceSlots
from localmoe.model.runner import ModelRunner

if TYPE_CHECKING:  # it needs Triton, which not every system has
    from localmoe.model.device_runner import DeviceRunner

ROOMY = 8 << 30  # a budget in which every test model fits with all its experts


def budget_for_slots(model: str, num_slots: int, **config: Any) -> int:
    """The VRAM budget in which exactly `num_slots` experts find room beside everything else."""
    _, plan = plan_model(model, EngineConfig(**{**config, "vram_budget_bytes": ROOMY}))
    return plan.total_bytes + plan.slot_bytes * (num_slots - plan.num_slots)


def load_with_slots(model: str | Path, num_slots: int, **config: Any) -> Engine:
    """An engine with room for `num_slots` experts."""
    budget = budget_for_slots(str(model), num_slots, **config)
    engine = Engine.load(str(model), EngineConfig(**config, vram_budget_bytes=budget))
    assert engine.plan.num_slots == num_slots
    return engine


def keep_slots(engine: Engine, num_slots: int) -> None:
    """From now on the engine has so many empty slots, whatever its budget has room for."""
    engine._budget._keep_slots(num_slots)
    engine._budget.empty_slots()
    assert engine._loaded.passes.memory.slots.num_slots == num_slots


@dataclass
class Answer:
    """A whole answer."""

    events: list[StreamEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def prompt(self) -> list[int]:
        return list(self.events[0].prompt_token_ids)

    @property
    def stats(self) -> GenerationStats:
        return self.events[-1].stats

    @property
    def finish_reason(self) -> str | None:
        return self.events[-1].finish_reason


def ask(engine: Engine, prompt: str | list[Message], num_tokens: int = 16, **request: Any) -> Answer:
    """The answer to a raw prompt, or to chat messages."""
    question = {"prompt": prompt} if isinstance(prompt, str) else {"messages": tuple(prompt)}
    whole = GenerationRequest(**question, max_new_tokens=num_tokens, **request)
    return Answer(list(engine.stream(whole)))


def runner_of(engine: Engine) -> ModelRunner | DeviceRunner:
    """What runs the engine's passes, which has no public name either."""
    return engine._loaded.runner


def device_runner_of(engine: Engine) -> DeviceRunner:
    """The same of an engine whose steps run whole on the device."""
    from localmoe.model.device_runner import DeviceRunner

    runner = engine._loaded.runner
    assert isinstance(runner, DeviceRunner)
    return runner


def memory_of(engine: Engine) -> ExpertMemory:
    """The expert memory, which has no public name, of an engine that launches layer by layer."""
    memory = engine._loaded.passes.memory
    assert isinstance(memory, ExpertMemory)
    return memory


class WatchedLink:
    """Counts copies, and fails those whose number (from 0) is in `failing`, as a broken driver would."""

    def __init__(self, link: Link, failing: range = range(0)) -> None:
        self.inner = link
        self._failing = failing
        self.started = 0
        self.copied_bytes = 0

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        number, self.started = self.started, self.started + 1
        if number in self._failing:
            raise RuntimeError(f"copy {number} was made to fail")
        self.inner.copy(record, slots, slot)
        self.copied_bytes += record.numel() * record.element_size()

    def after_read(self, slot: int) -> None:
        self.inner.after_read(slot)


def watch_link(memory: ExpertMemory, failing: range = range(0)) -> WatchedLink:
    """Put a watched link in front of a memory's own, in place of an earlier one."""
    link = memory.link
    watched = WatchedLink(link.inner if isinstance(link, WatchedLink) else link, failing)
    memory.link = watched
    return watched


def wait_until_idle(memory: ExpertMemory, polls: int = 3) -> None:
    """Until no copy runs and none that waits can start."""
    quiet = 0
    while quiet < polls:
        before = (memory.counters().h2d_bytes, len(memory._queue))
        threading.Event().wait(0.002)
        with memory.lock:
            running = bool(memory._table._loading)
        quiet = 0 if running or (memory.counters().h2d_bytes, len(memory._queue)) != before else quiet + 1


def check_consistent(engine: Engine) -> None:
    """Between answers nothing is pinned, wanted or forgotten, and every slot is accounted for."""
    memory = memory_of(engine)
    wait_until_idle(memory, polls=1)
    with memory.lock:
        table = memory._table
        assert not table._pins, "experts are still pinned"
        assert not memory._wanted, "experts are still wanted"
        assert not memory._failed, "a failure is kept for the next answer"
        used = [*table._resident.values(), *table._free]
        assert sorted(used) == list(range(table.num_slots)), "slots were lost or given twice"
        assert sum(table._slots_of_layer.values()) == len(table._resident)


def check_stats(answer: Answer) -> None:
    """What must hold of every answer's statistics, whatever ran."""
    stats = answer.stats
    assert stats.new_tokens == len(answer.tokens)
    assert 0 <= stats.accepted <= stats.drafted and stats.left_out >= 0
    assert stats.hits + stats.late + stats.misses == stats.expert_demands
    assert stats.hit_rate == (stats.hits / stats.expert_demands if stats.expert_demands else None)
    assert stats.acceptance_rate == (stats.accepted / stats.drafted if stats.drafted else None)
    assert stats.mean_draft_length == (stats.drafted / stats.steps if stats.steps else None)
    assert 0 <= stats.prefill_h2d_bytes <= stats.h2d_bytes
    assert 0 <= stats.reused_tokens < max(1, stats.prompt_tokens)
    peak, budget = stats.peak_device_bytes, stats.vram_budget_bytes
    assert 0 < peak <= budget, f"{peak:,} of {budget:,} bytes"
    assert sum(event.drafted for event in answer.events) <= stats.accepted
