"""How long a small upload waits behind expert copies that are under way: by a copy, and by a kernel that
fetches (kernels/mirror.py). Needs a GPU.

python benchmarks/uploads.py [--words 5120] [--mib 17]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from localmoe.kernels.mirror import Mirror


def wait_behind(copies: int, upload: Callable[[], object], record: torch.Tensor, slots: torch.Tensor) -> str:
    """Issue the copies on a stream of their own, then the upload on this one."""
    waits, calls, stream = [], [], torch.cuda.Stream()
    for _ in range(3):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for i in range(copies):
                slots[i % len(slots)].copy_(record, non_blocking=True)
        started = time.perf_counter()
        upload()
        calls.append(time.perf_counter() - started)
        there = torch.cuda.Event()
        there.record()
        there.synchronize()
        waits.append(time.perf_counter() - started)
    return f"{1e3 * min(waits):.3f} to {1e3 * max(waits):.3f} ms, of which the call {1e6 * min(calls):.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=int, default=5120)
    parser.add_argument("--mib", type=int, default=17)
    args = parser.parse_args()
    device = torch.device("cuda")
    mirror = Mirror(args.words, device)
    staging = torch.zeros(args.words, dtype=torch.int64).pin_memory()
    record = torch.zeros(args.mib << 20, dtype=torch.uint8).pin_memory()
    slots = torch.empty(64, args.mib << 20, dtype=torch.uint8, device=device)
    ways: dict[str, Callable[[], object]] = {
        "a copy": lambda: mirror.words.copy_(staging, non_blocking=True),
        "a kernel": mirror.upload,
    }
    for name, upload in ways.items():
        upload()
        for copies in (0, 1, 4, 16, 64, 336):
            print(f"{name}, behind {copies} copies: there after {wait_behind(copies, upload, record, slots)}")


if __name__ == "__main__":
    main()
