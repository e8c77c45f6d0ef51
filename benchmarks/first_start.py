"""How long a model takes to be ready, and what compiling has to do with it: a first start, with nothing in
Triton's and numba's caches; a first start of another model, with the CPU lane's code there; a second one.

    python benchmarks/first_start.py [--shape qwen1.5-moe-a2.7b] [--budget 16]

Needs a GPU. Weights are random and made on it, so reading files takes none of the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import knobs

from localmoe.core.config import EngineConfig
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.engine.rehearsal import Rehearsal
from localmoe.engine.twin import Twin


def start(shape: str, gib: float) -> None:
    """Load once, with the caches that the environment names."""
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
    with Engine.load_shape(shape, config, settings) as engine:
        print(f"  ready after {time.perf_counter() - began:.1f} s ({engine.info().lanes})")
    for label, (a, b) in sorted(spans.items(), key=lambda item: item[1]):
        print(f"  {label}: {b - a:.1f} s, from {a - began:.1f} s on")
    most = ", ".join(f"{count} {name}" for name, count in compiled.most_common(5))
    print(f"  {compiled.total()} kernels compiled or found{': ' if most else ''}{most}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budget", type=float, default=16.0)
    parser.add_argument("--here", action="store_true", help="load in this process, once")
    args = parser.parse_args()
    if args.here:
        return start(args.shape, args.budget)
    command = [sys.executable, __file__, "--here", "--shape", args.shape, "--budget", str(args.budget)]
    with tempfile.TemporaryDirectory() as folder:
        for name, triton in (
            ("first start", "a"),
            ("another model's first start", "b"),
            ("second start", "b"),
        ):
            print(f"synthetic: {args.shape}, {args.budget:g} GiB, {name}", flush=True)
            caches = {
                "TRITON_CACHE_DIR": str(Path(folder) / triton),
                "NUMBA_CACHE_DIR": str(Path(folder) / "numba"),
            }
            subprocess.run(command, env={**os.environ, **caches}, check=True)


if __name__ == "__main__":
    main()
