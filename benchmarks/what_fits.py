"""The table of the README: what models need of RAM and VRAM, and how many of their experts cards hold, by the
planner; nothing is loaded or measured.

    python benchmarks/what_fits.py [--no-packing] [--context 4096]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from pictures import as_published

from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_bytes
from localmoe.engine.planning import divide_memory
from localmoe.engine.settings import ComputeSettings
from localmoe.hardware.facts import Gpu, Hardware
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import SHAPES
from localmoe.model.skeleton import skeleton_from_config

GIB = 1 << 30
CARDS_GIB = (8, 12, 16, 24)
NAMES = {
    "olmoe-1b-7b": "OLMoE-1B-7B", "qwen1.5-moe-a2.7b": "Qwen1.5-MoE-A2.7B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite", "gpt-oss-20b": "gpt-oss-20b, in MXFP4",
    "gpt-oss-120b": "gpt-oss-120b, in MXFP4", "glm-4.7-flash": "GLM 4.7 Flash",
    "qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3-30b-a3b-fp8": "Qwen3-30B-A3B-FP8",
    "qwen3-30b-a3b-nvfp4": "Qwen3-30B-A3B-NVFP4", "qwen3-30b-a3b-int4": "Qwen3-30B-A3B-GPTQ-Int4",
    "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B",
    "qwen3.5-35b-a3b-fp8": "Qwen3.5-35B-A3B-FP8, Qwen3.6-35B-A3B-FP8",
    "qwen3.5-35b-a3b-int4": "Qwen3.5-35B-A3B-GPTQ-Int4",
    "kimi-linear-48b-a3b": "Kimi Linear 48B-A3B", "gemma-4-26b-a4b": "Gemma 4 26B-A4B",
    "lfm2-8b-a1b": "LFM2-8B-A1B", "granite-4.0-h-small": "Granite 4.0 H Small",
    "nemotron-3-nano": "Nemotron 3 Nano 30B-A3B",
    "nemotron-3-nano-nvfp4": "Nemotron 3 Nano 30B-A3B-NVFP4",
    "phi-3.5-moe": "Phi-3.5-MoE", "mixtral-8x7b": "Mixtral-8x7B",
}  # fmt: skip
COMPUTE = ComputeSettings(torch.device("cuda"), torch.bfloat16, whole_passes=True)


def usable(card_gib: int) -> int:
    """What driver and display leave: they take a twentieth, 512 MiB at least."""
    return card_gib * GIB - max(512 << 20, card_gib * GIB // 20)


def plan(footprint: ModelFootprint, budget: int, config: EngineConfig) -> MemoryPlan:
    """Of a computer with any amount of RAM.

    Raises:
        BudgetError: it does not fit.
    """
    gpu = Gpu(0, "a card", 80 * GIB, 80 * GIB, 0, (9, 0), None, None, None, None)
    computer = Hardware((gpu,), "", "", 8, 16, (), 512 * GIB, 500 * GIB, 500 * GIB, 0.0, "Linux", "3.12", "2")
    config = replace(config, vram_budget_bytes=budget)
    return divide_memory(footprint, config, COMPUTE, 2, hardware=computer)


def least(footprint: ModelFootprint, config: EngineConfig) -> int:
    """The smallest budget."""
    try:
        plan(footprint, 1 << 20, config)
    except BudgetError as error:
        assert error.budget_bytes is not None
        return error.budget_bytes
    raise AssertionError("a mebibyte is too little for all")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-packing", action="store_true")
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    config = EngineConfig(context=args.context, draft_length=0, pack_experts=not args.no_packing)
    for name, title in NAMES.items():
        skeleton = skeleton_from_config(SHAPES[name].config(), torch.bfloat16, name)
        footprint = measure_footprint(name, torch.bfloat16, skeleton, device="cuda").in_whole_passes()
        footprint = as_published(name, footprint.in_codes(packing=config.pack_experts))
        shares, contexts = [], []
        for card in CARDS_GIB:
            try:
                found = plan(footprint, usable(card), config)
                shares.append(f"{min(100.0, 100 * found.num_slots / footprint.total_experts):.0f}")
                unasked = plan(footprint, usable(card), replace(config, context=None))
                contexts.append(f"{unasked.context // 1024}k")
            except BudgetError:
                shares.append("-")
                contexts.append("-")
        smallest = least(footprint, config)
        tight = plan(footprint, smallest, config)
        draft = "has none"
        if not footprint.keeps_four_bits:
            draft = format_bytes(least(footprint, replace(config, draft_length=4)))
        print(
            f"| {title} | {format_bytes(tight.host_bytes)} | {format_bytes(smallest)} | {draft} | "
            f"{' / '.join(shares)} % | {' / '.join(contexts)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
