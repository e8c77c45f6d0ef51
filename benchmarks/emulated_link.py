"""Does prefetching by the draft's routing hide the link? moe-speq against on-demand: same budget, same
draft length, one run.

The link is emulated (a memory copy slowed down to a rate), so the ratio shows overlap, not the speed of a
machine. Rounds alternate between the policies, so that a busy machine disturbs both alike; medians are
printed.

    python benchmarks/emulated_link.py [--budget 72MiB] [--link 100MB/s] [--draft-length 4] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.prompts import BUNDLED_PROMPTS, Prompt, read_prompts
from localmoe.core.stats import GenerationStats
from localmoe.core.types import Message
from localmoe.core.units import parse_bytes, parse_speed
from localmoe.engine import Engine

POLICIES = ("on-demand", "moe-speq")


def answer(engine: Engine, prompt: Prompt, policy: str, draft_length: int, tokens: int) -> GenerationStats:
    """Statistics of one greedy answer."""
    request = GenerationRequest(
        messages=(Message("user", prompt.text),),
        max_new_tokens=tokens,
        draft_length=draft_length,
        policy=policy,
    )
    return list(engine.stream(request))[-1].stats


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run all rounds and return medians over rounds."""
    config = EngineConfig(
        device="cpu",
        vram_budget_bytes=parse_bytes(args.budget),
        emulated_link_bytes_per_s=parse_speed(args.link),
    )
    prompts = read_prompts(BUNDLED_PROMPTS, args.prompts)
    rounds: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    with Engine.load(args.model, config) as engine:
        for _ in range(args.rounds):
            for policy in POLICIES:
                engine.reset()
                stats = [answer(engine, p, policy, args.draft_length, args.tokens) for p in prompts]
                decoded = sum(s.new_tokens - 1 for s in stats)
                rounds[policy].append(
                    {
                        "tpot_ms": 1e3 * sum((s.tpot_s or 0) * (s.new_tokens - 1) for s in stats) / decoded,
                        "hit_rate": sum(s.hits for s in stats) / sum(s.expert_demands for s in stats),
                        "stall_ms_per_token": 1e3 * sum(s.stall_s or 0.0 for s in stats) / decoded,
                        "copied_MB_per_token": sum(s.h2d_bytes - s.prefill_h2d_bytes for s in stats)
                        / decoded
                        / 1e6,
                    }
                )
        info, plan = engine.info(), engine.plan
    medians = {
        policy: {name: statistics.median(entry[name] for entry in entries) for name in entries[0]}
        for policy, entries in rounds.items()
    }
    return {
        "model": info.name,
        "link": info.link,
        "slots": plan.num_slots,
        "resident_share": plan.resident_share,
        "draft_length": args.draft_length,
        "policies": medians,
        "tpot_ratio": medians["on-demand"]["tpot_ms"] / medians["moe-speq"]["tpot_ms"],
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--budget", default="72MiB")
    parser.add_argument("--link", default="100MB/s")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['model']}, link {result['link']}, {result['slots']} slots "
        f"({result['resident_share']:.0%} of the experts), draft length {result['draft_length']}"
    )
    for policy, row in result["policies"].items():  # type: ignore[attr-defined]
        print(f"  {policy:10s}", ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    print(f"moe-speq is {result['tpot_ratio']:.2f}x as fast as on-demand (time per output token)")


if __name__ == "__main__":
    main()
