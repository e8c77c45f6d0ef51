"""Attention of a layer on a CPU, in float32: by the lane's threads and by PyTorch's operations, beside what
reading keys and values takes at the rate measured in the same run. They lie in no cache of the processor's.

    python benchmarks/cpu_attention.py [--heads 16] [--kv-heads 16] [--width 128] [--live 256 1024 4096]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from in_place import read_rate
from torch import Tensor

from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.host_store import HostStore
from localmoe.experts.records import RecordLayout
from localmoe.kernels.activations import Activation
from localmoe.kernels.attention import KV_BLOCK, blocked_attention

ROWS = (1, 4, 128)
COLD_BYTES = 256 << 20  # of caches that are gone through in turn
ROUNDS = 5


def make_lane(threads: int) -> CpuLane:
    """Of an expert that nobody asks for."""
    store = HostStore([RecordLayout((32, 16), (16, 16), False)], 1, torch.bfloat16)
    return CpuLane(
        store, Activation("silu"), [(None, None)],
        tokens=max(ROWS), top_k=1, threads=threads, pinned=False, dtype=torch.float32, caller_works=True,
    )  # fmt: skip


def seconds(call: Callable[[Tensor, Tensor], Tensor], caches: list[Tensor]) -> float:
    """For one cache, the best of some rounds over all."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for keys, values in caches:
            call(keys, values)
        best = min(best, (time.perf_counter() - started) / len(caches))
    return best


def measure(lane: CpuLane, args: argparse.Namespace, live: int, rows: int, rate: float) -> str:
    """One line. Caches have room for more than is handed out, as an engine's have."""
    length = -(-live // KV_BLOCK) * KV_BLOCK
    one = torch.randn(2, args.kv_heads, length + KV_BLOCK, args.width)
    live_bytes = 4 * 2 * args.kv_heads * live * args.width
    made = [one.clone() for _ in range(max(2, COLD_BYTES // live_bytes))]
    caches = [memory[:, :, :length] for memory in made]
    query = torch.randn(args.heads, rows, args.width)
    seen = torch.arange(length) < live - rows + 1 + torch.arange(rows)[None, :, None]
    scale = args.width**-0.5

    def by_lane(keys: Tensor, values: Tensor) -> Tensor:
        return lane.attend(query, keys, values, seen, scale)

    def by_pytorch(keys: Tensor, values: Tensor) -> Tensor:
        return blocked_attention(query, keys, values, seen, scale)

    apart = float((by_lane(*caches[0]) - by_pytorch(*caches[0])).abs().max())
    return (
        f"{live} positions, {rows} tokens: lane {1e6 * seconds(by_lane, caches):.0f} us, PyTorch "
        f"{1e6 * seconds(by_pytorch, caches):.0f}, reading {1e6 * live_bytes / rate:.0f}; apart by at most "
        f"{apart:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--live", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    rate, lane = read_rate(), make_lane(args.threads)
    print(f"{args.threads} threads, reading {rate / 1e9:.1f} GB/s", flush=True)
    try:
        for live in args.live:
            for rows in ROWS:
                print(measure(lane, args, live, rows, rate), flush=True)
    finally:
        lane.close()


if __name__ == "__main__":
    main()
