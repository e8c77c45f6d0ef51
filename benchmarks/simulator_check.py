"""Does the simulator say what the engine does? The embedded model on the CPU over an emulated link, and the
simulator on the same routing, acceptance and times.

The run itself tells what it computed for (waiting for copies apart) and what a copy took; what it waited for
is simulated. Hit rates and time per output token are then compared.

    python benchmarks/simulator_check.py [--slots 42] [--link 100MB/s] [--prompts 8] [--tokens 64] [--rounds
    3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from support.engines import load_with_slots
from support.recorded_runs import machine_of, record_run

from localmoe.core.config import GenerationRequest
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.types import Message
from localmoe.core.units import parse_speed
from localmoe.prefetch.simulator import simulate


def main() -> None:
    """Run, simulate, print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=42)
    parser.add_argument("--link", default="100MB/s")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["on-demand", "sp-moe", "moe-speq"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts = read_prompts(BUNDLED_PROMPTS, args.prompts)
    link = parse_speed(args.link)
    few = load_with_slots("demo", args.slots, device="cpu", emulated_link_bytes_per_s=link)
    print("policy, draft length: hit rate real / simulated, TPOT ms real / simulated (medians of rounds)")
    with few:
        for policy in args.policies:
            for length in (0, 4):
                requests = [
                    GenerationRequest(
                        messages=(Message("user", prompt.text),),
                        max_new_tokens=args.tokens,
                        policy=policy,
                        draft_length=length,
                    )
                    for prompt in prompts
                ]
                rounds = []
                for _ in range(args.rounds):
                    recorder, stats = record_run(few, requests)
                    machine = machine_of(few, recorder, stats, args.slots)
                    found = simulate(policy, machine, recorder.story).counters.freeze()
                    demands = sum(s.expert_demands for s in stats)
                    decoded = sum(s.new_tokens - 1 for s in stats)
                    real_s = sum((s.tpot_s or 0.0) * (s.new_tokens - 1) for s in stats) / decoded
                    rounds.append(
                        (
                            sum(s.hits for s in stats) / demands,
                            found.hit_rate,
                            1e3 * real_s,
                            1e3 * (found.tpot_s or 0.0),
                        )
                    )
                real, simulated, real_ms, simulated_ms = map(statistics.median, zip(*rounds, strict=True))
                print(
                    f"{policy:10s} {length}: {100 * real:5.1f} / {100 * simulated:5.1f} %, "
                    f"{real_ms:6.2f} / {simulated_ms:6.2f} ms ({100 * (simulated_ms / real_ms - 1):+.1f} %)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
