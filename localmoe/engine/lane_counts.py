"""What an engine asks of the CPU lane, whether or not there is one. Counts and decides nothing itself."""

from __future__ import annotations

from dataclasses import replace

from localmoe.core.errors import ConfigError
from localmoe.engine.loading import EngineParts
from localmoe.experts.counters import TransferCounters
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.in_place import InPlaceMemory
from localmoe.model.runner import ModelRunner


def allow_cpu(parts: EngineParts, allowed: bool) -> bool:
    """Let the next answer's passes take the CPU lane, or not; whether they may now.

    Raises:
        ConfigError: they are not to, and cannot do without.
    """
    if isinstance(parts.runner, ModelRunner) or parts.runner.passes.lane is None:
        return False
    if parts.runner.passes.lane.needed and not allowed:
        raise ConfigError(
            "Experts on the disk come by the CPU, which a strict answer does without: load the model with "
            "strict on, or its experts in RAM."
        )
    parts.runner.passes.lane.begin_answer(allowed=allowed)
    return allowed


def missing_expert_s(parts: EngineParts) -> float:
    """Seconds by which one more missing expert makes a pass longer, at the rates of the lanes that fetch or
    compute it; 0 while no copy was timed."""
    if isinstance(parts.runner, ModelRunner):
        return parts.runner.passes.memory.copy_s() or 0.0
    passes = parts.runner.passes
    copy_s, lane = passes.memory.copy_s or 0.0, passes.lane
    if lane is None or not lane.allowed or lane.failure:
        return copy_s
    cpu_s = lane.measured.first_us / 1e6
    if not lane.link:
        return cpu_s
    link_s = lane.measured.link_us / 1e6
    return link_s * cpu_s / (link_s + cpu_s)


def count_transfers(parts: EngineParts) -> TransferCounters:
    """Copies since the slots were made, and what was read from the disk, and computed by the CPU of experts
    where they lie, since load."""
    memory = parts.passes.memory
    totals = memory.counters()
    if isinstance(parts.store, DiskStore):
        read = parts.store.counters()
        totals = replace(totals, disk_bytes=read.disk_bytes, disk_busy_s=read.disk_busy_s)
    if isinstance(memory, InPlaceMemory):
        done = memory.lane.counters()
        return replace(totals, cpu_bytes=done.num_bytes, cpu_busy_s=done.busy_s, cpu_jobs=done.jobs)
    lane = None if isinstance(parts.runner, ModelRunner) else parts.runner.passes.lane
    if lane is None:
        return totals
    done = lane.counters()
    return replace(
        totals,
        cpu_bytes=done.num_bytes,
        cpu_busy_s=done.busy_s,
        cpu_jobs=done.jobs,
        cpu_waited=lane.waited,
        cpu_ahead_bytes=done.ahead_bytes,
    )
