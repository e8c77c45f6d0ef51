"""What each policy does, predicted by the simulator: on the H200 of docs/log.md (with its measured times, so
that runs on it can be held against this), and on recorded routing.

    python benchmarks/policy_simulations.py [--h200] [--trace FILE.npz]

--trace replays a recorded routing of the embedded model (localmoe trace demo --out FILE.npz) layer by layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localmoe.core.synthetic import RoutingSpec, SyntheticSettings, parse_routing
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.optimum import optimal_hits
from localmoe.prefetch.registry import POLICIES
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Machine, Prompt, Window

# Qwen1.5-MoE-A2.7B as measured: one draft token 1.725 ms, verifying 2.474 ms and 4 us an expert, 50 GB/s
H200 = {"expert_bytes": 17_301_504, "copy_s": 17_301_504 / 50e9, "draft_token_s": 1.725e-3, "layer_s": 8.5e-5,
        "expert_s": 4.3e-6, "step_s": 1e-4}  # fmt: skip
# the embedded model on a CPU core, over a link that takes half a millisecond an expert
CPU = {"expert_bytes": 196_608, "copy_s": 5.5e-4, "draft_token_s": 3e-3, "layer_s": 3e-4, "expert_s": 2e-5,
       "whole_passes": False}  # fmt: skip


def show(name: str, machine: Machine, settings: SyntheticSettings, lengths: list[int], answers: int) -> None:
    """A line a policy and draft length."""
    print(f"{name}, {machine.num_slots} slots, {settings}")
    for length in lengths:
        best: int | None = None
        for policy in POLICIES:
            tally = simulate(policy, machine, story(machine, settings, length, answers))
            if best is None:
                best = optimal_hits(
                    tally.demands, machine.num_slots, whole_steps=machine.whole_passes, counted=tally.counted
                )
            stats, tokens, name = tally.counters.freeze(), tally.counters.new_tokens - 1, f"{policy:13s}"
            reuse, best_reuse = 1 - tally.copies / tally.num_demands, best / tally.num_demands
            print(
                f"  {name} {length:2d}: {stats.tokens_per_s:6.1f} tok/s, hit rate {stats.hit_rate:.3f}, "
                f"reused {reuse:.3f} of at best {best_reuse:.3f}, "
                f"{tally.copies / tokens:5.1f} copies a token, "
                f"{stats.prefetched / tokens:5.1f} ahead of need, {stats.wasted / tokens:.2f} wasted, "
                f"{stats.late / tokens:.2f} late",
                flush=True,
            )


def story(
    machine: Machine, settings: SyntheticSettings, length: int, answers: int
) -> Iterator[Prompt | Window]:
    """Answers of 96 tokens after prompts of 256, or 64 after 64 of a trace."""
    model = SyntheticModel(settings, machine.num_layers, machine.num_experts, machine.experts_per_token)
    is_trace = settings.routing is not None and settings.routing.kind == "trace"
    prompt, new = (64, 64) if is_trace else (256, 96)
    return windows(model, draft_length=length, answers=answers, prompt_tokens=prompt, new_tokens=new)


def main() -> None:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--h200", action="store_true")
    parser.add_argument("--trace", type=Path, metavar="FILE.npz")
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    parser.add_argument("--answers", type=int, default=4)
    args = parser.parse_args()
    if args.h200:
        for routing in ("sticky:0.5", "sticky:0.8", "uniform"):
            settings = SyntheticSettings(parse_routing(routing), 0.9, 0.9)
            for slots in (100, 345):
                machine = Machine(24, 60, 4, slots, **H200)  # type: ignore[arg-type]
                show("Qwen1.5-MoE-A2.7B on an H200", machine, settings, args.lengths, args.answers)
    if args.trace is not None:
        settings = SyntheticSettings(RoutingSpec("trace", path=args.trace), 0.93, 0.91)
        for slots in (20, 40, 63):
            machine = Machine(6, 16, 4, slots, **CPU)  # type: ignore[arg-type]
            show("the embedded model, layer by layer", machine, settings, args.lengths, 6 * args.answers)


if __name__ == "__main__":
    main()
