"""How soon the first token of a long prompt comes, in passes of 1,024 tokens and in as long ones as there is
memory for, and whether both say the same.

python benchmarks/long_prompts.py [--shape qwen3-30b-a3b] [--budgets 8,12] [--prompts 1000,4000,8000,16000]

Weights are random (localmoe bench --shape), and so are the prompts; slots are full of what the answers before
asked for. Beside each time stand the bytes that went over the link and what they take at its measured rate.
Without the CPU, whose sums end otherwise.
"""

from __future__ import annotations

import argparse
import gc

import numpy as np
import torch

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import BudgetError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.engine import Engine
from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK
from localmoe.hardware.probe import probe_hardware
from localmoe.model.device_runner import DeviceRunner


def first_token(engine: Engine, ids: tuple[int, ...], rows: int) -> tuple[float, int, list[int]]:
    """Seconds, bytes over the link, and the tokens of a short answer, in passes of up to `rows` tokens."""
    runner = engine._loaded.runner
    assert isinstance(runner, DeviceRunner), "steps run whole on the GPU"
    runner.sequence.truncate(0)
    runner.passes.prompt_rows = rows
    before = runner.passes.memory.counters().h2d_bytes
    request = GenerationRequest(prompt_token_ids=ids, max_new_tokens=8, draft_length=0)
    told: list[int] = []
    seconds, copied = 0.0, 0
    for event in engine.stream(request):
        if not told:
            seconds, copied = event.stats.ttft_s, runner.passes.memory.counters().h2d_bytes - before
        told += event.token_ids
    return seconds, copied, told


def measure(shape: str, gib: float, prompts: list[int], link: float, draft: str) -> None:
    """One budget."""
    config = EngineConfig(
        device="cuda", context=max(prompts) + 64, vram_budget_bytes=int(gib * 2**30),
        draft_length="auto" if draft == "auto" else 0, drafter="self", strict=True,
    )  # fmt: skip
    chance = np.random.default_rng(0)
    with Engine.load_shape(shape, config, SyntheticSettings()) as engine:
        plan = engine.plan
        print(
            f"synthetic: {shape}, {gib:g} GiB: {100 * plan.resident_share:.0f} % of the experts in slots, "
            f"passes of up to {plan.prefill_chunk} tokens",
            flush=True,
        )
        for length in prompts:
            ids = tuple(chance.integers(0, engine.footprint.vocab_size, length).tolist())
            answers = []
            for rows in (DEVICE_PREFILL_CHUNK, plan.prefill_chunk):
                found = [first_token(engine, ids, rows) for _ in range(2)]
                answers += [told for _, _, told in found]
                seconds, copied, _ = min(found)
                print(
                    f"  {length} tokens in passes of {rows}: {seconds:.3f} s, {length / seconds:.0f} tok/s; "
                    f"{copied / 1e9:.1f} GB over the link, {copied / link:.3f} s",
                    flush=True,
                )
            print("  the same answers" if len({tuple(told) for told in answers}) == 1 else "  ANSWERS DIFFER")
        held, peak = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        print(f"  held at most {held / 2**30:.2f} GiB, in use {peak / 2**30:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--budgets", default="8,12")
    parser.add_argument("--prompts", default="1000,4000,8000,16000")
    parser.add_argument("--draft", choices=["auto", "none"], default="none")
    args = parser.parse_args()
    gpu = probe_hardware().gpus[0]
    link = gpu.h2d_bytes_per_s or 50e9
    print(f"{gpu.name}, copies at {link / 1e9:.1f} GB/s", flush=True)
    for gib in map(float, args.budgets.split(",")):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            measure(args.shape, gib, [int(size) for size in args.prompts.split(",")], link, args.draft)
        except BudgetError as error:
            print(f"synthetic: {args.shape}, {gib:g} GiB: {error}", flush=True)


if __name__ == "__main__":
    main()
