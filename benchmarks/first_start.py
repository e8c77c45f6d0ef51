"""How long a model takes to be ready, and what compiling has to do with it: a first start, with nothing in
Triton's and numba's caches; a first start of another model, with the CPU lane's code there; a second one.

    python benchmarks/first_start.py [--shape qwen1.5-moe-a2.7b] [--budget 16] [--files]

Needs a GPU. Weights are random and made on it, so reading files takes none of the time; with --files they
are read from a disk, as a downloaded model's are, and from the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from load_speed import drop_cache, published, write_files
from triton import knobs

from localmoe.core.config import EngineConfig
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.engine.rehearsal import Rehearsal
from localmoe.engine.twin import Twin
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.shapes import find_shape

DEMO = Path(__file__).resolve().parents[1] / "assets" / "demo-moe"  # whose tokenizer serves


def start(shape: str, gib: float, folder: str | None) -> None:
    """Load once, with the caches that the environment names: random weights, or those in the folder."""
    spans: dict[str, tuple[float, float]] = {}
    compiled: Counter[str] = Counter()
    knobs.runtime.jit_post_compile_hook = lambda **said: compiled.update([said["fn"].name.split(".")[-1]])

    def timed(owner: Any, name: str, label: str) -> None:
        usual: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return usual(*args)
            finally:
                spans.setdefault(label, (began, time.perf_counter()))

        setattr(owner, name, run)

    timed(Twin, "compile_passes", "compiling passes")
    timed(Twin, "compile_lane", "compiling the CPU lane")
    timed(Rehearsal, "wait", "waiting for that")
    config = EngineConfig(device="cuda", context=2048, vram_budget_bytes=int(gib * 2**30))
    settings = SyntheticSettings(parse_routing("uniform"), 0.9, 0.9)
    began = time.perf_counter()
    with Engine.load(folder, config) if folder else Engine.load_shape(shape, config, settings) as engine:
        print(f"  ready after {time.perf_counter() - began:.1f} s ({engine.info().lanes})")
    for label, (a, b) in sorted(spans.items(), key=lambda item: item[1]):
        print(f"  {label}: {b - a:.1f} s, from {a - began:.1f} s on")
    most = ", ".join(f"{count} {name}" for name, count in compiled.most_common(5))
    print(f"  {compiled.total()} kernels compiled or found{': ' if most else ''}{most}", flush=True)


def write_model(folder: Path, name: str) -> tuple[Path, ...]:
    """A checkpoint of the shape, of small random numbers, as published ones are; its files."""
    config = find_shape(name).config()
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes: dict[str, list[int]] = {}
    for parameter, tensor in model.named_parameters():
        shapes |= published(parameter, list(tensor.shape))
    numbers = torch.randn(32 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    write_files(folder, shapes, numbers.view(torch.uint8).numpy().tobytes())
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return Checkpoint.open(folder).files


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budget", type=float, default=16.0)
    parser.add_argument("--files", action="store_true", help="read the weights from a disk")
    parser.add_argument("--here", help="load this folder, or - for random weights, in this process, once")
    args = parser.parse_args()
    if args.here:
        return start(args.shape, args.budget, None if args.here == "-" else args.here)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files: tuple[Path, ...] = ()
        starts = [("first start", "a"), ("another model's first start", "b"), ("second start", "b")]
        if args.files:
            began = time.perf_counter()
            files = write_model(folder / "model", args.shape)
            size = sum(file.stat().st_size for file in files)
            print(f"{size / 1e9:.1f} GB written in {time.perf_counter() - began:.0f} s", flush=True)
            starts = [
                ("first start", "a"),
                ("second start", "a"),
                ("first start", "c"),
                ("second start", "c"),
            ]
        for number, (name, triton) in enumerate(starts):
            from_disk = number < 2
            if files and from_disk:
                drop_cache(files)
            source = f", read from {'the disk' if from_disk else 'memory'}" if files else ""
            print(f"synthetic: {args.shape}, {args.budget:g} GiB, {name}{source}", flush=True)
            subprocess.run(
                [
                    *(sys.executable, __file__, "--shape", args.shape, "--budget", str(args.budget)),
                    *("--here", str(folder / "model") if files else "-"),
                ],
                env={
                    **os.environ,
                    "TRITON_CACHE_DIR": str(folder / triton),
                    "NUMBA_CACHE_DIR": str(folder / (f"numba-{triton}" if files else "numba")),
                },
                check=True,
            )


if __name__ == "__main__":
    main()
