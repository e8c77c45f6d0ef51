"""What an engine leaves of its VRAM budget, by PyTorch's allocator and in the driver's view, after answers
that take many kinds of passes: prompts of several lengths, drafts of several lengths, greedy, sampled and
penalised, with the CPU lane and without, so that many graphs are captured.

    python benchmarks/budget_left.py [--cases gpt-oss-20b:8:0 qwen1.5-moe-a2.7b:12:4] [--prompts 7000 1100]

A case is SHAPE:GIB:DRAFT-LENGTH. Weights and routing are synthetic. Nothing else may use the GPU meanwhile:
the driver's view is of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.model.device_runner import DeviceRunner

CONTEXT = 8192
PROMPTS = (60, 1100, 2500, 7000)  # tokens
LENGTHS = (0, 1, 4, 8, 16, 64)  # drafted tokens
SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_p=0.9, seed=3),
    SamplingConfig(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=3),
)
MIB = 1 << 20


def answer(engine: Engine, ids: tuple[int, ...], length: int, strict: bool, sampling: SamplingConfig) -> None:
    """Long enough for windows of `length` drafted tokens to be captured."""
    request = GenerationRequest(
        prompt_token_ids=ids, max_new_tokens=24 if length < 64 else 100, draft_length=length, strict=strict,
        sampling=sampling,
    )  # fmt: skip
    for _ in engine.stream(request):
        pass


def watch(name: str, gib: float, drafting: int, prompts: Sequence[int], lengths: Sequence[int]) -> None:
    """One model under one budget."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free_before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    config = EngineConfig(
        device="cuda", vram_budget_bytes=int(gib * 2**30), context=CONTEXT, draft_length=drafting
    )
    settings = SyntheticSettings(parse_routing("uniform"), 0.9, 0.9)
    started = time.perf_counter()
    with Engine.load_shape(name, config, settings) as engine:
        runner, budget = engine._loaded.runner, engine.plan.budget_bytes
        assert isinstance(runner, DeviceRunner)
        least_free = free_before
        for prompt in prompts:
            ids = tuple(
                np.random.default_rng(prompt).integers(0, engine.footprint.vocab_size, prompt).tolist()
            )
            for sampling in SAMPLINGS:
                for strict in (True, False):
                    for length in lengths if engine.plan.drafting else (0,):
                        answer(engine, ids, length, strict, sampling)
                        least_free = min(least_free, torch.cuda.mem_get_info()[0])
            allocator = budget - torch.cuda.max_memory_reserved()
            driver = budget - (free_before - least_free)
            print(
                f"synthetic: {name}, {gib:g} GiB, workspace {engine.plan.workspace_bytes / MIB:.0f} MiB: "
                f"left after {prompt} tokens {allocator / MIB:.0f} MiB by the allocator, "
                f"{driver / MIB:.0f} in the driver's view, {len(runner.issue._graphs)} graphs, "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=["gpt-oss-20b:8:0", "qwen1.5-moe-a2.7b:12:4"])
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS)
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    args = parser.parse_args()
    torch.zeros(1, device="cuda")  # the context is nobody's
    for case in args.cases:
        name, gib, drafting = case.split(":")
        watch(name, float(gib), int(drafting), args.prompts, args.lengths)


if __name__ == "__main__":
    main()
