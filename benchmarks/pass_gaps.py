"""How long the GPU has nothing to do between the passes of plain decoding: with each pass issued once the
host has read the one before, and with it issued behind that one (model/device_steps.py). Needs a GPU.

python benchmarks/pass_gaps.py [--shape qwen1.5-moe-a2.7b] [--budgets 16 5 40] [--tokens 160]

Weights and routing are synthetic, prompts are random tokens; answers of the two kinds take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.model import device_steps
from localmoe.model.step_graphs import PassOutput, StepGraphs

NEVER = 1 << 60


@contextmanager
def watched_passes() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Begin and end of every pass, on the GPU's clock."""
    found, original = [], StepGraphs.run

    def run(self: StepGraphs, key: Hashable, body: Callable[[], PassOutput]) -> PassOutput:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        output = original(self, key, body)
        ended.record()
        found.append((began, ended))
        return output

    StepGraphs.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        StepGraphs.run = original  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budgets", type=float, nargs="*", default=[16.0, 5.0, 40.0])
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    settings = SyntheticSettings(parse_routing(args.routing), None, None)
    budget = int(args.budgets[0] * 2**30)
    config = EngineConfig(device="cuda", context=2048, vram_budget_bytes=budget, draft_length=0)
    usual = device_steps.RUN_BEHIND_AFTER
    with Engine.load_shape(args.shape, config, settings) as engine:
        print(f"synthetic: {args.shape}, {args.routing}; {engine.info().lanes}")
        for gib in args.budgets:
            engine.resize(int(gib * 2**30))
            for turn in range(7):  # the first one captures passes
                device_steps.RUN_BEHIND_AFTER = NEVER if turn % 2 else usual
                ids = np.random.default_rng(turn).integers(0, engine.footprint.vocab_size, 40).tolist()
                request = GenerationRequest(
                    prompt_token_ids=tuple(ids), max_new_tokens=args.tokens, draft_length=0
                )
                with watched_passes() as passes:
                    for event in engine.stream(request):
                        stats = event.stats
                torch.cuda.synchronize()
                took = [began.elapsed_time(ended) for began, ended in passes]
                gaps = [a[1].elapsed_time(b[0]) for a, b in pairwise(passes)]
                if turn:
                    print(
                        f"synthetic: {gib:g} GiB, {'one by one' if turn % 2 else 'behind each other'}: "
                        f"{stats.tokens_per_s or 0:.1f} tok/s; a pass {np.median(took):.3f} ms, nothing to "
                        f"do between two {np.median(gaps):.3f} ms; hits {100 * (stats.hit_rate or 0):.1f} %",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
