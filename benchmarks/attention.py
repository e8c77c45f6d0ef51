"""Attention of a layer over a live cache on a GPU, beside its floor: DeepSeek-V2-Lite's in latent space (and
as it would be with the cache expanded), and grouped-query attention.

    python benchmarks/attention.py [--parts 128 256 512] [--prompts]

Times are microseconds a call inside a CUDA graph over distinct caches, sized for the graphs that the engine
captures (1k, 4k, 16k .. positions). "floor" is the live cache's bytes over the copy bandwidth measured in the
same run. --parts tries other lengths of a part of the latent cache; --prompts takes passes of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from dense_kernels import DEVICE, DTYPE, columns, copy_bandwidth, error_of, graph_us, normal
from torch import Tensor

from localmoe.kernels.dense import reference_attention, reference_latent_attention
from localmoe.kernels.gpu import latent_attention as latent_module
from localmoe.kernels.gpu.attention import attention
from localmoe.kernels.gpu.latent_attention import latent_attention
from localmoe.kernels.gpu.linear import linear

LIVE = (1024, 8192, 32_768)
ROWS = (1, 9, 64)
PROMPT = 1024
CAPACITY = LIVE[-1]
COLD = 4  # caches, of which a level-2 cache does not hold all at long live lengths
Cache = tuple[Tensor, Tensor]
Call = Callable[[int, int, int, Cache], Tensor]  # rows, position of the first, launch size, cache


class Latent:
    """16 heads over latent vectors of 512 and rotated keys of 64, as DeepSeek-V2-Lite has."""

    name, position_bytes = "deepseek-v2-lite", 2 * (512 + 64)
    scale = 192**-0.5

    def __init__(self) -> None:
        self.query = normal(1, 16, PROMPT, 192)
        self.caches = [(normal(1, 1, CAPACITY, 512), normal(1, 1, CAPACITY, 64)) for _ in range(COLD)]
        self.weight = normal(16 * 256, 512, scale=512**-0.5)
        by_head = self.weight.view(16, 256, 512)
        self.weights = by_head[:, :128], by_head[:, 128:]

    def attend(self, rows: int, first: int, room: int, cache: Cache) -> Tensor:
        start = starts[first]
        query = self.query[:, :, :rows]
        return latent_attention(
            query, *cache, *self.weights, start, scale=self.scale, max_length=room
        )  # fmt: skip

    def expanded(self, rows: int, first: int, room: int, cache: Cache) -> Tensor:
        """Keys and values of all positions first, as transformers makes them."""
        latent, rope = (part[:, :, :room] for part in cache)
        made = linear(latent[0, 0], self.weight).view(1, room, 16, 256).transpose(1, 2)
        key = torch.empty((1, 16, room, 192), device=DEVICE, dtype=DTYPE)
        key[..., :128].copy_(made[..., :128])
        key[..., 128:].copy_(rope.expand(-1, 16, -1, -1))
        query, start = self.query[:, :, :rows], starts[first]
        return attention(query, key, made[..., 128:], start, scale=self.scale, max_length=room)

    def exact(self, rows: int, first: int, cache: Cache) -> Tensor:
        tensors = (t.double() for t in (self.query[:, :, :rows], *cache, *self.weights))
        query, latent, rope, keys, values = tensors
        return reference_latent_attention(query, latent, rope, keys, values, starts[first], scale=self.scale)


class Grouped:
    """32 query heads over 4 KV heads of 128, as Qwen3-30B-A3B has."""

    name, position_bytes = "qwen3-30b-a3b", 2 * 2 * 4 * 128
    scale = 128**-0.5

    def __init__(self) -> None:
        shape = (1, 4, CAPACITY, 128)
        self.query = normal(1, 32, PROMPT, 128)
        self.caches = [(normal(*shape), normal(*shape)) for _ in range(COLD)]

    def attend(self, rows: int, first: int, room: int, cache: Cache) -> Tensor:
        return attention(
            self.query[:, :, :rows], *cache, starts[first], scale=self.scale, max_length=room
        )  # fmt: skip

    def exact(self, rows: int, first: int, cache: Cache) -> Tensor:
        tensors = (t.double() for t in (self.query[:, :, :rows], *cache))
        query, keys, values = tensors
        return reference_attention(query, keys, values, starts[first], scale=self.scale)


class Starts(dict[int, Tensor]):
    """Positions on the device."""

    def __missing__(self, first: int) -> Tensor:
        self[first] = torch.tensor([first], device=DEVICE)
        return self[first]


starts = Starts()


def room_for(live: int) -> int:
    """Positions of the engine's graph for so many."""
    room = 1024
    while room < live:
        room *= 4
    return min(room, CAPACITY)


def times(call: Call, model: Latent | Grouped, live: int, rows: Sequence[int]) -> list[float]:
    return [graph_us(partial(call, n, live - n, room_for(live)), model.caches, replays=7) for n in rows]


def decode(model: Latent | Grouped, live: int, bandwidth: float, label: str = "") -> None:
    """Draft passes and windows whose last row is at position live - 1."""
    floor = model.position_bytes * live / bandwidth * 1e6
    text = f"{model.name:17s} live {live:6d} floor {floor:6.1f} | T{ROWS} "
    text += columns(times(model.attend, model, live, ROWS)) + label
    if not label:
        first, cache = live - 9, model.caches[0]
        exact = model.exact(9, first, cache)
        text += f" | error {error_of(model.attend(9, first, room_for(live), cache), exact):.1e}"
        if isinstance(model, Latent):
            wide = error_of(model.expanded(9, first, room_for(live), cache), exact)
            text += f" | expanded T1 T9 {columns(times(model.expanded, model, live, ROWS[:2]))}, {wide:.1e}"
    print(text, flush=True)


def prompt(model: Latent | Grouped) -> None:
    """Passes of 1,024 tokens, and that nine of them alone have the same bits."""
    for live in (PROMPT, *LIVE[1:]):
        text = f"{model.name:17s} prompt of {PROMPT} up to {live:6d}: "
        text += columns(times(model.attend, model, live, [PROMPT]))
        if isinstance(model, Latent):
            text += f" | expanded {columns(times(model.expanded, model, live, [PROMPT]))}"
        cache, first = model.caches[0], live - PROMPT
        whole = model.attend(PROMPT, first, room_for(live), cache)[:9]
        same = torch.equal(model.attend(9, first, room_for(first + 9), cache), whole)
        print(text + (" | bits ok" if same else " | BITS DIFFER"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", type=int, default=[], help="positions a part of the latent cache"
    )
    parser.add_argument("--prompts", action="store_true", help="passes of 1,024 tokens instead of few")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device.")
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s (read and written); us a layer")
    for part in args.parts:
        latent_module.PART = part
        for live in LIVE:
            decode(Latent(), live, bandwidth, f" | parts of {part}")
    for model in () if args.parts else (Latent(), Grouped()):
        if args.prompts:
            prompt(model)
        else:
            for live in LIVE:
                decode(model, live, bandwidth)


if __name__ == "__main__":
    main()
