"""Time that the scheduler and its policy take of a step: every event, every request, and the scores
before a pass.

Steps are simulated as on a GPU (whole passes) with sticky routing; only the scheduler's own calls are timed,
by a clock that needs no system call (13 calls a step are timed). Measure on an idle machine.

    python benchmarks/scheduler_cost.py [--shape qwen1.5-moe-a2.7b] [--draft-length 4] [--slots 345] [--steps
    300]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.registry import POLICIES
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_pass_steps import PassSteps
from localmoe.prefetch.simulator_passes import PassMemory
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Machine, Tally, Window

SHAPES = {"qwen1.5-moe-a2.7b": (24, 60, 4), "qwen3-30b-a3b": (48, 128, 8), "mixtral-8x7b": (32, 8, 2)}


def timed(spent: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, whose time is added to `spent`."""

    def run(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*args)
        finally:
            spent[0] += time.perf_counter() - started

    return run


def cost(policy: str, shape: tuple[int, int, int], slots: int, draft_length: int, steps: int) -> list[float]:
    """Seconds of each step."""
    layers, experts, top_k = shape
    machine = Machine(layers, experts, top_k, slots, 17_301_504, 3.2e-4, 1.7e-3, 8.5e-5, 4.3e-6, 1e-4)
    memory: PassMemory
    scheduler = Scheduler(POLICIES[policy](CacheShape(*shape, slots)), clock=lambda: memory.now)
    memory = PassMemory(machine, scheduler)
    scheduler.attach(memory, copies=lambda: memory.copies)
    spent = [0.0]
    scheduler.notify = timed(spent, scheduler.notify)  # type: ignore[method-assign]
    scheduler.keep_scores = timed(spent, scheduler.keep_scores)  # type: ignore[method-assign]
    model = SyntheticModel(SyntheticSettings(parse_routing("sticky:0.5"), 0.9, 0.9), *shape)
    runner, found = PassSteps(machine, scheduler, memory), []
    for part in windows(
        model, draft_length=draft_length, answers=1, prompt_tokens=0, new_tokens=steps * (draft_length + 1)
    ):
        assert isinstance(part, Window)
        spent[0] = 0.0
        runner.step(part, Tally())
        found.append(spent[0])
    return found[10:]


def main() -> None:
    """Measure every policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen1.5-moe-a2.7b")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--slots", type=int, default=345)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(f"{args.shape}, {args.slots} slots, draft length {args.draft_length}: ms of CPU a step")
    for policy in POLICIES:
        seconds = cost(policy, SHAPES[args.shape], args.slots, args.draft_length, args.steps)
        ordered = sorted(1e3 * s for s in seconds)
        print(
            f"  {policy:13s} least {ordered[0]:.3f}, median {statistics.median(ordered):.3f}, "
            f"nine of ten below {ordered[int(0.9 * len(ordered))]:.3f}"
        )


if __name__ == "__main__":
    main()
