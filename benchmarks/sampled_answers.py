"""What sampling costs: an answer's speed by its sampling settings, and the kernels that choose. Needs a GPU.

python benchmarks/sampled_answers.py [--shape qwen1.5-moe-a2.7b] [--budgets 16 40] [--lengths 0 8]

Weights, routing and acceptance are synthetic, prompts are random tokens. Of random weights the logits are
nearly alike, so that more is cut off by top-p than of a trained model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine

SETTINGS = {
    "greedy": SamplingConfig(),
    "greedy, penalty 1.05": SamplingConfig(repetition_penalty=1.05),
    "temperature 1": SamplingConfig(1.0, seed=1),
    "0.6, top-p 0.95, penalty 1.05": SamplingConfig(0.6, 0.95, repetition_penalty=1.05, seed=1),
    "0.7, top-p 0.8, top-k 20": SamplingConfig(0.7, 0.8, 20, seed=1),
}


def kernel_times(vocab: int) -> Iterator[str]:
    """Microseconds of choosing, captured as passes are."""
    from localmoe.model.device_choice import DeviceChoice

    for scale, what in ((2.5, "spread as a trained model's"), (0.5, "nearly alike")):
        for rows in (1, 9, 33):
            generator = torch.Generator().manual_seed(1)
            logits = scale * torch.randn(rows, vocab, generator=generator)
            # a few stand out, as they do in text
            logits[:, torch.randint(vocab, (40,), generator=generator)] += 3 * scale
            logits = logits.cuda().bfloat16()
            tokens, start = torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.zeros(1).long().cuda()
            positions = torch.arange(rows, device="cuda")
            choice = DeviceChoice(torch.device("cuda"))
            choice.prepare(logits)
            for name, config in SETTINGS.items():
                choice.begin(config, 1, list(range(500)))
                choice.choose(logits, positions)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    choice.note(start, tokens)
                    choice.choose(logits, positions)
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()
                began.record()
                for _ in range(50):
                    graph.replay()
                ended.record()
                torch.cuda.synchronize()
                yield f"{rows} rows of {vocab} logits {what}, {name}: {began.elapsed_time(ended) * 20:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budgets", type=float, nargs="*", default=[16.0, 40.0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[0, 8])
    parser.add_argument("--routing", default="sticky:0.66")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--no-kernels", action="store_true")
    args = parser.parse_args()
    if not args.no_kernels:
        for line in kernel_times(151_936):
            print(line, flush=True)
    settings = SyntheticSettings(parse_routing(args.routing), 0.97, 0.9)
    config = EngineConfig(
        device="cuda", context=2048, vram_budget_bytes=int(args.budgets[0] * 2**30), drafter="self"
    )
    with Engine.load_shape(args.shape, config, settings) as engine:
        print(f"synthetic: {args.shape}, {args.routing}; {engine.info().lanes}")
        for gib in args.budgets:
            engine.resize(int(gib * 2**30))
            for length in args.lengths:
                for name, sampling in SETTINGS.items():
                    for turn in range(3):  # the first one captures passes
                        ids = np.random.default_rng(turn).integers(0, engine.footprint.vocab_size, 40)
                        request = GenerationRequest(
                            prompt_token_ids=tuple(ids.tolist()), max_new_tokens=args.tokens,
                            draft_length=length, sampling=sampling,
                        )  # fmt: skip
                        for event in engine.stream(request):
                            stats = event.stats
                        if turn:
                            rate, hits = stats.tokens_per_s or 0, 100 * (stats.hit_rate or 0)
                            what = f"synthetic: {gib:g} GiB, draft length {length}, {name}"
                            print(f"{what}: {rate:.1f} tok/s, hits {hits:.1f} %", flush=True)


if __name__ == "__main__":
    main()
