"""What an engine asks of the CPU lane, whether or not there is one. Counts and decides nothing itself."""

from __future__ import annotations

from dataclasses import replace

from localmoe.engine.loading import EngineParts
from localmoe.experts.counters import TransferCounters
from localmoe.model.runner import ModelRunner


def allow_cpu(parts: EngineParts, allowed: bool) -> bool:
    """Let the next answer's passes take the CPU lane, or not; whether they may now."""
    if isinstance(parts.runner, ModelRunner) or parts.runner.passes.lane is None:
        return False
    parts.runner.passes.lane.allowed = allowed
    return allowed


def count_transfers(parts: EngineParts) -> TransferCounters:
    """Copies since the slots were made, and what the CPU lane computed since load."""
    totals = parts.passes.memory.counters()
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
