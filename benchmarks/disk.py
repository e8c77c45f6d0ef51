"""What experts on the disk cost: tokens a second by how much RAM holds some of them, beside what the disk
alone would allow (bytes that were read a token, over the rate that it was measured with in the same run).

    python benchmarks/disk.py [--shape qwen3-30b-a3b] [--budget 12] [--ram 16 24] [--routing sticky:0.66]
        [--tokens 96] [--prompt 100] [--answers 3] [--idle 0] [--without-link] [--by-layers]
        [--device cuda]

Weights and routing are synthetic (localmoe bench --shape), prompts are random tokens; the file with all
experts is written to localmoe's home (LOCALMOE_HOME) and deleted at the end. `--ram 0` is all of them in RAM,
for comparison. `--without-link`: each answer twice, first with kernels that read nothing in RAM.
`--by-layers`: passes layer by layer through the host, which waits for the disk in the GPU's place.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
import torch

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.stats import GenerationStats
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.experts.disk_memory import DiskExpertMemory
from localmoe.experts.disk_reader import DiskReader
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.record_file import RecordFile
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.shapes import SHAPES

GIB = 1 << 30
READS, AT_ONCE = 200, 8  # records, to measure the disk by


def disk_rate(file: RecordFile) -> float:
    """Bytes a second of records here and there, some at a time."""
    chance, reader = random.Random(0), DiskReader(file.path)
    memory = torch.empty(AT_ONCE, file.stride(0) + 4096, dtype=torch.uint8)
    rooms = [row[-row.data_ptr() % 4096 :][: file.stride(0)] for row in memory]
    began, done = time.perf_counter(), 0
    for _ in range(READS // AT_ONCE):
        reads = []
        for room in rooms:
            layer, expert = chance.randrange(len(file.layouts)), chance.randrange(file.num_experts)
            if file.stride(layer) == file.stride(0):
                reads.append(reader.read(file.offset(layer, expert), room))
        for read in reads:
            read.result()
            done += file.stride(0)
    rate = done / (time.perf_counter() - began)
    reader.close()
    return rate


def answer(engine: Engine, seed: int, prompt: int, tokens: int) -> GenerationStats:
    ids = np.random.default_rng(seed).integers(0, engine.footprint.vocab_size, prompt).tolist()
    for event in engine.stream(GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=tokens)):
        stats = event.stats
    return stats


def read_ram(engine: Engine, reads: bool) -> None:
    """Whether kernels may, from the next pass on."""
    runner = engine._loaded.runner
    assert isinstance(runner, DeviceRunner) and isinstance(runner.passes.memory, DiskExpertMemory)
    runner.passes.memory.reads_ram = reads


def link_share(stats: GenerationStats) -> float:
    """Per cent of what passes asked for that kernels read, at least in part, over the link."""
    return 100 * stats.misses / max(1, stats.hits + stats.late + stats.misses + stats.computed)


def measure(ram: float, args: argparse.Namespace) -> None:
    """One amount of RAM."""
    settings = SyntheticSettings(parse_routing(args.routing))
    config = EngineConfig(
        vram_budget_bytes=None if args.budget is None else int(args.budget * GIB), context=args.context,
        draft_length=0, device=args.device, experts_on="disk" if ram else "ram",
        ram_budget_bytes=int(ram * GIB) if ram else None, lanes="vram+link" if args.by_layers else "auto",
    )  # fmt: skip
    began = time.perf_counter()
    with Engine.load_shape(SHAPES[args.shape], config, settings) as engine:
        plan, total = engine.plan, engine.footprint.total_experts
        store = engine._loaded.store
        what = f"{args.shape}, {args.budget or 'no'} GiB of VRAM, {args.routing}"
        rate = None
        if isinstance(store, DiskStore):
            rate = disk_rate(store.file)
            what += f", {ram:g} GiB of RAM for {100 * plan.ram_experts / total:.0f} % of the experts"
            what += f", file of {plan.disk_bytes / GIB:.1f} GiB"
        print(f"synthetic: {what}: ready after {time.perf_counter() - began:.0f} s", flush=True)
        if rate:
            print(f"  records are read with {rate / 1e9:.2f} GB/s", flush=True)
        if args.idle:
            engine.captures.begin()
            time.sleep(args.idle)
        for number in range(args.answers * (1 + args.without_link)):
            alone = args.without_link and number % 2 == 0
            if args.without_link:
                read_ram(engine, not alone)
            stats = answer(engine, number, args.prompt, args.tokens)
            told = f"  first token after {stats.ttft_s:.2f} s, {stats.tokens_per_s or 0:.1f} tok/s, "
            told += f"at hand {100 * (stats.hit_rate or 0):.0f} %"
            told += f", over the link {link_share(stats):.0f} %" if args.device == "cuda" else ""
            told += " (left to the CPU)" if alone else ""
            if rate:
                read = stats.disk_bytes_per_token or 0.0
                allows = rate / read if read else float("inf")
                told += f", {read / 1e6:.0f} MB a token from the disk, which allows {allows:.1f} tok/s"
                told += f"; prompt read {(stats.disk_bytes - read * (stats.new_tokens - 1)) / 1e9:.2f} GB"
            print("synthetic:" + told, flush=True)
        stats = answer(engine, 99, args.long, 2)
        told = f"{stats.ttft_s:.2f} s, {stats.disk_bytes / 1e9:.1f} GB read"
        print(f"synthetic:   {args.long} tokens of prompt: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--budget", type=float, help="GiB of VRAM; default: what is free")
    parser.add_argument("--ram", type=float, nargs="+", default=[24.0], help="GiB; 0: all experts in RAM")
    parser.add_argument("--routing", default="sticky:0.66")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--long", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=3)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds before the first answer")
    parser.add_argument("--without-link", action="store_true")
    parser.add_argument("--by-layers", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    args = parser.parse_args()
    for ram in args.ram:
        measure(ram, args)


if __name__ == "__main__":
    main()
