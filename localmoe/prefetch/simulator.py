"""Replay windows of routing on a policy, in simulated time: the same policy objects, scheduler and rules as
in an engine. Results are predictions. Draws no routing (see simulator_sources) and knows no card.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from localmoe.core.expert_counts import demanded_of
from localmoe.prefetch.policy import CacheShape, PolicyFactory
from localmoe.prefetch.registry import policy_factory
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_disk_passes import DiskPassMemory
from localmoe.prefetch.simulator_in_place import InPlaceMemory
from localmoe.prefetch.simulator_lanes import LaneMemory
from localmoe.prefetch.simulator_layers import LayerMemory, LayerSteps
from localmoe.prefetch.simulator_pass_steps import PassSteps
from localmoe.prefetch.simulator_passes import PassMemory
from localmoe.prefetch.simulator_types import Machine, Prompt, Tally, Window

_Memory = LayerMemory | InPlaceMemory | PassMemory


class _Steps(Protocol):
    """Either way of running a story."""

    @property
    def memory(self) -> _Memory:
        """What it runs on."""

    def prompt(self, prompt: Prompt) -> None:
        """A prompt, uncounted."""

    def step(self, window: Window, tally: Tally) -> None:
        """A step, counted in `tally`."""


def simulate(
    policy: str | PolicyFactory, machine: Machine, story: Iterable[Prompt | Window], *, warm_up: int = 0
) -> Tally:
    """Run a story from empty slots.

    Args:
        policy: its name, or what makes it.
        warm_up: so many windows are run and not counted.

    Returns:
        Counters as of one answer; `prefetched`, `wasted` and copies are those of the windows counted.
    """
    make = policy_factory(policy) if isinstance(policy, str) else policy
    shape = CacheShape(machine.num_layers, machine.num_experts, machine.experts_per_token, machine.num_slots)
    steps = _make_steps(make, shape, machine)
    memory, tally, ignored, left = steps.memory, Tally(), Tally(), warm_up
    for part in story:
        before = _Before(memory.copies, memory.reads, memory.prefetched, memory.wasted, memory.stall_s)
        is_counted = isinstance(part, Window) and not left
        tally.demands.append(demanded_of(part.target, machine.num_experts))
        tally.counted.append(is_counted)
        if isinstance(part, Prompt):
            memory.begin_answer()
            steps.prompt(part)
        elif not is_counted:
            left -= 1
            steps.step(part, ignored)
        else:
            steps.step(part, tally)
            _count(tally, part, memory, before)
    tally.counters.new_tokens += 1  # the one that came with the prompt, which decoding time does not count
    tally.counters.decode_h2d_bytes = int(tally.copies * machine.expert_bytes)
    if machine.disk is not None:
        tally.counters.decode_disk_bytes = tally.reads * machine.disk.read_bytes
    return tally


class _Before(NamedTuple):
    """A memory's totals before a window."""

    copies: float
    reads: int
    prefetched: int
    wasted: int
    stall_s: float


def _count(tally: Tally, window: Window, memory: _Memory, before: _Before) -> None:
    """A window's own counts, and what the memory did in it."""
    counters = tally.counters
    counters.steps += 1
    counters.drafted += window.drafted
    counters.accepted += window.accepted
    counters.new_tokens += window.accepted + 1
    counters.prefetched += memory.prefetched - before.prefetched
    counters.wasted += memory.wasted - before.wasted
    counters.stall_s = (counters.stall_s or 0.0) + memory.stall_s - before.stall_s
    tally.copies += memory.copies - before.copies
    tally.reads += memory.reads - before.reads


def _make_steps(make: PolicyFactory, shape: CacheShape, machine: Machine) -> _Steps:
    memory: _Memory
    scheduler = Scheduler(make(shape), clock=lambda: memory.now)
    if machine.whole_passes:
        memory = passes = _pass_memory(machine, scheduler)
        scheduler.attach(memory, copies=lambda: memory.copies)
        return PassSteps(machine, scheduler, passes)
    if machine.disk is None:
        memory = slots = LayerMemory(machine, scheduler.choose_victim)
        scheduler.attach(memory, copy_s=slots.copy_s)
        return LayerSteps(machine, scheduler, slots)
    memory = in_place = InPlaceMemory(machine, machine.disk)
    scheduler.attach(memory)
    return LayerSteps(machine, scheduler, in_place)


def _pass_memory(machine: Machine, scheduler: Scheduler) -> PassMemory:
    if machine.lane is None:
        assert machine.disk is None, "what the disk has comes to the CPU"
        return PassMemory(machine, scheduler)
    lanes: LaneMemory | DiskPassMemory
    if machine.disk is None:
        lanes = LaneMemory(machine, scheduler, machine.lane)
    else:
        lanes = DiskPassMemory(machine, scheduler, machine.lane, machine.disk)
    scheduler.watch_cpu(lambda: lanes.cpu_busy_s)
    return lanes
