"""What drafting by a model's own MTP layer is worth: the same model in the same VRAM without a draft, and
with that layer, by drafted tokens a step and the share of them that is accepted; and what the layer adds to
a prompt. (With the INT4 draft of all layers in the same VRAM: draft_place.py.)

    python benchmarks/mtp.py [--shapes qwen3.5-35b-a3b] [--budgets 8 12 16] [--routing sticky:0.66]
        [--lengths 1 2 3 auto] [--acceptances 0.6 0.85] [--tokens 128]

Weights, routing and acceptance are synthetic (localmoe bench --shape), prompts are random tokens; times and
hit rates are measured.
"""

from __future__ import annotations

import argparse

import numpy as np
from synthetic_engine import simulate

from localmoe.core.config import DraftLength, EngineConfig, GenerationRequest, parse_draft_length
from localmoe.core.stats import GenerationStats
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.model.shapes import SHAPES

PROMPT, LONG_PROMPT = 100, 1000  # tokens


def answer(engine: Engine, length: DraftLength, tokens: int, prompt: int = PROMPT) -> GenerationStats:
    """Statistics of the last of three answers; those before capture passes and fill slots."""
    for seed in (0, 1, 2):
        ids = np.random.default_rng(seed).integers(0, engine.footprint.vocab_size, prompt).tolist()
        request = GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=tokens, draft_length=length)
        for event in engine.stream(request):
            stats = event.stats
    return stats


def show(what: str, stats: GenerationStats) -> float:
    """Print and return milliseconds a token."""
    tpot_ms, steps = 1e3 * (stats.tpot_s or 0.0), max(1, stats.steps)
    print(
        f"synthetic: {what}: {tpot_ms:6.2f} ms a token ({1e3 / max(tpot_ms, 1e-9):5.1f} tok/s), "
        f"{stats.new_tokens / steps:.2f} tokens a step, draft {1e3 * stats.draft_s / steps:.2f} ms and "
        f"verify {1e3 * stats.verify_s / steps:.2f} ms a step, hit rate {100 * (stats.hit_rate or 0):.1f} %",
        flush=True,
    )
    return tpot_ms


def measure(name: str, budget: float, args: argparse.Namespace) -> None:
    """One shape in one budget."""
    settings = SyntheticSettings(parse_routing(args.routing), acceptance=args.acceptances[0])
    config = {"vram_budget_bytes": int(budget * 2**30), "context": 4096, "device": args.device}
    where = f"{name}, {budget:g} GiB, {args.routing}"
    with Engine.load_shape(SHAPES[name], EngineConfig(**config, draft_length=0), settings) as engine:
        share = engine.plan.num_slots / (engine.footprint.num_layers * engine.footprint.num_experts)
        plain = show(f"{where}, {100 * share:.0f} % in slots, no draft", answer(engine, 0, args.tokens))
        ttft = answer(engine, 0, 4, LONG_PROMPT).ttft_s
    print(f"synthetic: {where}, no draft: {LONG_PROMPT} tokens read in {ttft:.3f} s", flush=True)
    with Engine.load_shape(SHAPES[name], EngineConfig(**config, drafter="mtp"), settings) as engine:
        share = engine.plan.num_slots / (engine.footprint.num_layers * engine.footprint.num_experts)
        held = engine.device_memory()["draft"] / 2**20
        print(
            f"synthetic: {where}: {engine.info().draft}; {held:.0f} MiB of it, {100 * share:.0f} % in slots"
        )
        show(f"{where}, MTP loaded, nothing drafted", answer(engine, 0, args.tokens))
        for acceptance in args.acceptances:
            simulate(engine, args.routing, acceptance, None)
            for length in args.lengths:
                what = f"{where}, MTP, acceptance {acceptance:g}, {length} tokens a step"
                took = show(what, answer(engine, length, args.tokens))
                print(f"synthetic: {what}: {plain / took:.2f} x as fast as without", flush=True)
        ttft = answer(engine, "auto", 4, LONG_PROMPT).ttft_s
        print(f"synthetic: {where}, MTP: {LONG_PROMPT} tokens read in {ttft:.3f} s")
        peak = engine.peak_device_bytes() / 2**30
        print(f"synthetic: {where}, MTP: peak {peak:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(name for name, shape in SHAPES.items() if shape.has_mtp)
    parser.add_argument("--shapes", nargs="+", default=["qwen3.5-35b-a3b"], choices=known)
    parser.add_argument("--budgets", nargs="+", type=float, default=[12.0])
    parser.add_argument("--routing", default="sticky:0.66")
    parser.add_argument("--lengths", nargs="+", type=parse_draft_length, default=[1, 2, 3, "auto"])
    parser.add_argument("--acceptances", nargs="+", type=float, default=[0.6, 0.85])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    for name in args.shapes:
        for budget in args.budgets:
            measure(name, budget, args)


if __name__ == "__main__":
    main()
