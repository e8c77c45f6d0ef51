"""Where `auto` keeps the draft, and what that is worth: the speed of answer after answer with the draft
length left to the engine, beside those of the same answers with the draft kept in VRAM (fixed lengths).

    python benchmarks/draft_place.py [--shape qwen1.5-moe-a2.7b] [--budgets 16 12] [--cases uniform:0.9 ...]

Weights, routing and acceptance are synthetic (localmoe bench --shape), prompts are random tokens; speeds are
measured.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from synthetic_engine import simulate

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.stats import GenerationStats
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine

MATCH = 0.9


def answer(
    engine: Engine, number: int, tokens: int, length: int | None = None
) -> tuple[GenerationStats, float]:
    """Statistics, and tokens a second without the time in which passes were captured."""
    ids = np.random.default_rng(number).integers(0, engine.footprint.vocab_size, 80).tolist()
    before = engine.live.capture_s()
    request = GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=tokens)
    if length is not None:
        request = replace(request, draft_length=length)
    for event in engine.stream(request):
        stats = event.stats
    assert stats.tpot_s is not None
    captured_s = engine.live.capture_s() - before
    return stats, (tokens - 1) / max(1e-9, stats.tpot_s * (tokens - 1) - captured_s)


def follow(engine: Engine, case: str, answers: int, tokens: int, lengths: list[int]) -> None:
    """One routing and acceptance: `auto` from a fresh start, then fixed lengths."""
    routing, acceptance = case.rsplit(":", 1)
    simulate(engine, routing, float(acceptance), MATCH)
    engine.reset()
    place = engine._draft_place
    print(f"synthetic: routing {routing}, acceptance {acceptance}")
    for number in range(answers):
        stats, speed = answer(engine, number, tokens)
        plan = engine.plan
        drafted = f"{stats.mean_draft_length:.1f}" if stats.mean_draft_length is not None else "-"
        share, hits = 100 * plan.resident_share, 100 * (stats.hit_rate or 0)
        print(
            f"  auto, answer {number + 1}: {speed:6.1f} tok/s, first after {stats.ttft_s:.2f} s, draft "
            f"{'aside  ' if plan.draft_aside else 'in VRAM'}, {share:.0f} % of the experts in slots, hit "
            f"rate {hits:.0f} %, drafted {drafted} a step; known: {place._worth.drafted_per_s or 0:.1f} with "
            f"it, {place._worth.bound_per_s or 0:.1f} at least without, {place._worth.plain_per_s or 0:.1f} "
            "measured without"
        )
    started = time.perf_counter()
    aside = engine.plan.draft_aside
    engine.reset()
    if aside:
        print(f"  taking the draft back took {time.perf_counter() - started:.2f} s")
    for length in lengths:
        speeds, hits = [], 0.0
        answer(engine, 0, tokens, length)
        for number in range(answers):
            stats, speed = answer(engine, number, tokens, length)
            speeds.append(speed)
            hits += (stats.hit_rate or 0) / answers
        mean = answers / sum(1 / speed for speed in speeds)
        each = ", ".join(f"{speed:.1f}" for speed in speeds)
        print(
            f"  draft length {length}: {mean:6.1f} tok/s over the same answers ({each}), hit rate "
            f"{100 * hits:.0f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budgets", type=float, nargs="*", default=[16.0, 12.0])
    parser.add_argument("--cases", nargs="*", default=["uniform:0.9", "sticky:0.5:0.9", "sticky:0.5:0.97"])
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--lengths", type=int, nargs="*", default=[0, 4])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    config = EngineConfig(
        device=args.device, context=2048, vram_budget_bytes=int(args.budgets[0] * 2**30), drafter="self"
    )
    settings = SyntheticSettings(parse_routing("uniform"), 0.9, MATCH)
    with Engine.load_shape(args.shape, config, settings) as engine:
        print(f"synthetic: {args.shape}; {engine.info().lanes}")
        for gib in args.budgets:
            plan = engine.resize(int(gib * 2**30))
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            print(f"synthetic: {gib:g} GiB, {100 * plan.resident_share:.0f} % of the experts in slots")
            for case in args.cases:
                follow(engine, case, args.answers, args.tokens, args.lengths)
            if args.device == "cuda":
                peak = torch.cuda.max_memory_reserved() / 2**30
                print(f"synthetic: peak of the allocator {peak:.2f} of {gib:g} GiB")


if __name__ == "__main__":
    main()
