"""How fast the dense step kernels are, beside PyTorch and beside what memory bandwidth allows; first, whether
they are right: the error against float64, and whether a row's bits depend on the rows that ride along.

Times are microseconds a call inside a CUDA graph over enough distinct weights or caches that the level-2
cache does not hold them. "floor" is bytes read / copy bandwidth measured in the same run.

    python benchmarks/dense_kernels.py [--only SECTION ...] [--sweep] [--seconds 140]
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from localmoe.kernels.dense import reference_attention, reference_linear_gated, reference_rms_norm
from localmoe.kernels.gpu.attention import attention
from localmoe.kernels.gpu.configs import RowConfig, TileConfig, num_multiprocessors, row_config, tile_config
from localmoe.kernels.gpu.linear import gemv, gemv_gated, linear, linear_gated
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.rope import apply_rope, write_kv
from localmoe.kernels.gpu.router import route

T = TypeVar("T")
Late = Callable[[], bool]
Tile = tuple[int, ...]
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
COLD_BYTES = 200_000_000  # more than any level-2 cache
POSITIONS = 32_768
BIT_COUNTS = (1, 2, 9, 16, 33, 80, 1024)
TIMED_COUNTS = (1, 9, 16, 64)


@dataclass(frozen=True)
class Product:
    """One weight (columns, depth) of a model; `gated` has gate and up on top of each other."""

    name: str
    columns: int
    depth: int
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.columns * self.depth

    def weights(self) -> list[Tensor]:
        count = min(24, max(2, -(-COLD_BYTES // self.num_bytes)))
        return [normal(self.columns, self.depth, scale=self.depth**-0.5) for _ in range(count)]

    def exact(self, x: Tensor, weight: Tensor, config: TileConfig | None = None) -> Tensor:
        return linear_gated(x, weight, config=config) if self.gated else linear(x, weight, config=config)

    def one_row(self, x: Tensor, weight: Tensor, config: RowConfig | None = None) -> Tensor:
        return gemv_gated(x, weight, config=config) if self.gated else gemv(x, weight, config=config)

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.double(), weight.double()
        return reference_linear_gated(x, weight) if self.gated else x @ weight.T


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int = 128


PRODUCTS = (
    Product("qwen1.5 q/k/v", 6144, 2048),
    Product("qwen1.5 o", 2048, 2048),
    Product("qwen1.5 shared gate_up", 11_264, 2048, gated=True),
    Product("qwen1.5 shared down", 2048, 5632),
    Product("qwen1.5/3 head", 151_936, 2048),
    Product("qwen3-30b q/k/v", 5120, 2048),
    Product("qwen3-30b o", 2048, 4096),
    Product("mixtral q/k/v", 6144, 4096),
    Product("mixtral o", 4096, 4096),
    Product("mixtral head", 32_000, 4096),
)
HEADS = (
    Heads("qwen1.5 16/16x128", 16, 16),
    Heads("qwen3-30b 32/4x128", 32, 4),
    Heads("mixtral 32/8x128", 32, 8),
)
ROUTERS = (("qwen1.5", 60, 2048, 4), ("qwen3-30b", 128, 2048, 8), ("mixtral", 8, 4096, 2))
TILES = (
    (16, 16, 256, 2, 5), (16, 16, 256, 2, 6), (16, 16, 256, 4, 5), (16, 16, 512, 2, 3), (16, 16, 512, 4, 3),
    (16, 32, 128, 4, 5), (16, 32, 256, 4, 4), (16, 32, 256, 2, 4), (16, 64, 128, 4, 4),
)  # fmt: skip
TALL_TILES = (
    (32, 16, 256, 4, 4),
    (32, 32, 256, 4, 3),
    (32, 64, 128, 4, 4),
    (64, 32, 128, 2, 4),
    (64, 64, 64, 2, 4),
)
ROW_TILES = ((1, 2048, 4), (2, 2048, 4), (4, 2048, 4), (4, 2048, 8), (4, 1024, 4), (8, 1024, 4), (8, 1024, 8))


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * scale


def graph_us(call: Callable[[T], object], items: Sequence[T], replays: int = 15) -> float:
    """Median time of call(item), one call for each item captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(items[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for item in items:
            call(item)
    times = []
    for i in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return float(sorted(times)[len(times) // 2]) * 1e3 / len(items)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_us(target.copy_, [source] * 4) * 1e-6)


def error_of(result: Tensor, exact: Tensor) -> float:
    """Largest error relative to the largest value."""
    return float((result.double() - exact).abs().max() / exact.abs().max())


def bits_of(call: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Row counts whose rows differ from those of all rows at once, from the beginning or the end."""
    whole = call(x)
    same = {
        n: torch.equal(call(x[:n]), whole[:n]) and torch.equal(call(x[-n:]), whole[-n:]) for n in BIT_COUNTS
    }
    bad = [n for n, equal in same.items() if not equal]
    return f"BITS DIFFER AT {bad}" if bad else "bits ok"


def columns(times: Sequence[float]) -> str:
    return " ".join(f"{time:6.1f}" for time in times)


def measure_product(product: Product, bandwidth: float) -> str:
    """Exact and one-row products against cuBLAS (for gated ones F.linear alone, without the activation)."""
    weights, x = product.weights(), normal(1024, product.depth)
    few = x[:33]
    error = error_of(product.exact(few, weights[0]), product.reference(few, weights[0]))
    one_error = error_of(product.one_row(x[:1], weights[0]), product.reference(x[:1], weights[0]))
    bits = bits_of(lambda rows: product.exact(rows, weights[0]), x)
    one = graph_us(lambda w: product.one_row(x[:1], w), weights)

    def exact(count: int) -> float:
        return graph_us(lambda w: product.exact(x[:count], w), weights)

    def cublas(count: int) -> float:
        return graph_us(lambda w: F.linear(x[:count], w), weights)

    return (
        f"{product.name:23s} floor {product.num_bytes / bandwidth * 1e6:6.1f} | one row {one:6.1f} | exact "
        f"T{TIMED_COUNTS} {columns([exact(n) for n in TIMED_COUNTS])} | cuBLAS "
        f"{columns([cublas(n) for n in TIMED_COUNTS])} | {bits}, error {error:.1e} {one_error:.1e}"
    )


def section_products(bandwidth: float, late: Late) -> None:
    """Products of a decode step."""
    for product in PRODUCTS:
        if late():
            return print("  (out of time)")
        print(" ", measure_product(product, bandwidth), flush=True)


def measure_prompt(product: Product) -> str:
    """1024 rows against cuBLAS."""
    weights, x = [normal(product.columns, product.depth)] * 4, normal(1024, product.depth)
    exact = graph_us(lambda w: product.exact(x, w), weights)
    cublas = graph_us(lambda w: F.linear(x, w), weights)
    work = 2e-6 * 1024 * product.columns * product.depth
    return (
        f"{product.name:23s} exact {exact:7.1f} us {work / exact:5.0f} TFLOP/s | "
        f"cuBLAS {cublas:7.1f} us {work / cublas:5.0f} TFLOP/s"
    )


def section_prompt(bandwidth: float, late: Late) -> None:
    """Products of a prompt."""
    for product in PRODUCTS[:4]:
        print(" ", measure_prompt(product), flush=True)


def measure_rows(count: int, x: Tensor, residual: Tensor, weight: Tensor) -> str:
    """Norms, rotary embedding and cache writes of `count` rows."""
    caches = [torch.zeros(1, 16, 4096, 128, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    start = torch.tensor([100], device=DEVICE)
    fused = normal(count, 6144)
    q, k, v = (part.view(1, count, 16, 128).transpose(1, 2) for part in fused.split(2048, 1))
    heads = fused.view(count, 48, 128)[:, :32]
    turn = normal(1, count, 128)
    rows, added = x[:count], residual[:count]
    calls: dict[str, Callable[[int], object]] = {
        "norm": lambda _: rms_norm(rows, weight, 1e-6),
        "residual + norm": lambda _: rms_norm(rows, weight, 1e-6, added),
        "32 head norms": lambda _: rms_norm(heads, weight[:128], 1e-6),
        "rope": lambda _: apply_rope(q, k, turn, turn),
        "kv write": lambda _: write_kv(k, v, caches[0], caches[1], start),
    }
    return ", ".join(f"{name} {graph_us(call, range(20)):.1f}" for name, call in calls.items())


def section_rows(bandwidth: float, late: Late) -> None:
    """What is bound by launches."""
    x, residual, weight = normal(1024, 2048), normal(1024, 2048), normal(2048)
    error = error_of(rms_norm(x, weight, 1e-6), reference_rms_norm(x.double(), weight.double(), 1e-6))
    print(f"  norm: {bits_of(lambda rows: rms_norm(rows, weight, 1e-6), x)}, error {error:.1e}")
    for count in (1, 9, 1024):
        print(f"  T {count:5d}:", measure_rows(count, x, residual, weight), flush=True)


class AttentionRig:
    """Caches full of numbers, and launches sized for all of them."""

    def __init__(self, kind: Heads) -> None:
        self.kind = kind
        self.scale = kind.dim**-0.5
        shape = (1, kind.kv_heads, POSITIONS, kind.dim)
        self.caches = [(normal(*shape), normal(*shape)) for _ in range(6)]
        self.query = normal(1, kind.heads, 1024, kind.dim)

    def call(
        self, begin: int, end: int, cache: tuple[Tensor, Tensor], start: Tensor, room: int = POSITIONS
    ) -> Tensor:
        return attention(
            self.query[:, :, begin:end], cache[0], cache[1], start, scale=self.scale, max_length=room
        )

    def at_length(self, live: int, bandwidth: float) -> str:
        """Decode steps and windows whose last row is at position live - 1."""

        def timed(rows: int) -> float:
            start = torch.tensor([live - rows], device=DEVICE)
            return graph_us(lambda cache: self.call(0, rows, cache, start), self.caches)

        start = torch.tensor([live - 9], device=DEVICE)
        key, value = (t[:, :, :live].double() for t in self.caches[0])
        exact = reference_attention(self.query[:, :, :9].double(), key, value, start, scale=self.scale)
        error = error_of(self.call(0, 9, self.caches[0], start), exact)
        floor = 4 * self.kind.kv_heads * live * self.kind.dim / bandwidth * 1e6
        return (
            f"{self.kind.name:20s} live {live:6d} floor {floor:6.1f} | T1 T9 T64 "
            f"{columns([timed(rows) for rows in (1, 9, 64)])} | error {error:.1e}"
        )

    def prompt(self) -> str:
        """1024 rows at once, and that nine of them alone have the same bits."""
        cache, first = self.caches[0], torch.zeros(1, dtype=torch.int64, device=DEVICE)
        late = first + 7168
        whole = self.call(0, 1024, cache, late)
        same = torch.equal(self.call(512, 521, cache, late + 512, 8000), whole[512:521])
        mine = [graph_us(lambda start: self.call(0, 1024, cache, start), [at] * 2) for at in (first, late)]
        group = self.kind.heads // self.kind.kv_heads
        key, value = (t[:, :, :1024].repeat_interleave(group, 1) for t in cache)
        torch_us = graph_us(
            lambda q: F.scaled_dot_product_attention(q, key, value, is_causal=True), [self.query] * 2
        )
        return (
            f"{self.kind.name:20s} prompt of 1024 at 0: {mine[0]:.0f} (PyTorch {torch_us:.0f}), at 7168: "
            f"{mine[1]:.0f} | {'bits ok' if same else 'BITS DIFFER between prompt and window'}"
        )


def section_attention(bandwidth: float, late: Late) -> None:
    """Attention over the cache."""
    for kind in HEADS:
        if late():
            return print("  (out of time)")
        rig = AttentionRig(kind)
        for live in (1024, 8192, POSITIONS):
            print(" ", rig.at_length(live, bandwidth), flush=True)
        print(" ", rig.prompt(), flush=True)


def measure_router(experts: int, hidden: int, top_k: int) -> str:
    """Two kernels, and in brackets PyTorch's."""
    weights, x = [normal(experts, hidden, scale=hidden**-0.5) for _ in range(24)], normal(1024, hidden)

    def mine(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return route(rows, weight, top_k, score="softmax", renormalise=True)

    def plain(rows: Tensor, weight: Tensor) -> object:
        best = torch.topk(F.linear(rows, weight).float().softmax(-1), top_k)
        return best.values / best.values.sum(-1, keepdim=True), best.indices

    def both(count: int) -> str:
        rows = x[:count]
        times = [graph_us(lambda w: mine(rows, w), weights), graph_us(lambda w: plain(rows, w), weights)]
        return f"T{count} {times[0]:.1f} ({times[1]:.1f})"

    error = error_of(mine(x[:9], weights[0])[2], x[:9].double() @ weights[0].double().T)
    bits = bits_of(lambda rows: torch.cat([t.double() for t in mine(rows, weights[0])], 1), x)
    return f"{' '.join(both(n) for n in (1, 9, 64))} | {bits}, error {error:.1e}"


def section_router(bandwidth: float, late: Late) -> None:
    """Routers."""
    for name, experts, hidden, top_k in ROUTERS:
        print(
            f"  {name:10s} {experts}x{hidden} top {top_k}: {measure_router(experts, hidden, top_k)}",
            flush=True,
        )


def best_of(
    name: str, tiles: Sequence[Tile], chosen: Tile, timed: Callable[[Tile], float], late: Late
) -> None:
    """Print the three fastest blocks and the table's own."""
    found: dict[Tile, float] = {}
    for tile in dict.fromkeys((chosen, *tiles)):
        if late():
            return print("  (out of time)")
        try:
            found[tile] = timed(tile)
        except Exception as error:  # a block that does not compile or fit must not end the sweep
            print(f"    {tile}: {type(error).__name__}: {str(error)[:90]}")
    best = ", ".join(f"{tile} {found[tile]:.1f}" for tile in sorted(found, key=found.__getitem__)[:3])
    print(f"  {name:32s} best {best} | chosen {chosen} {found.get(chosen, float('nan')):.1f}", flush=True)


def sweep_product(product: Product, late: Late) -> None:
    """Blocks of the exact product with 16 and 64 rows, and of the one-row product."""
    sms = num_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    weights, x = product.weights(), normal(64, product.depth)
    width, matrices = (product.columns // 2, 2) if product.gated else (product.columns, 1)

    def exact(count: int, tile: Tile) -> float:
        config = TileConfig(*tile)
        return graph_us(lambda w: product.exact(x[:count], w, config), weights, replays=9)

    def one_row(tile: Tile) -> float:
        config = RowConfig(*tile)
        return graph_us(lambda w: product.one_row(x[:1], w, config), weights, replays=9)

    for count, tiles in ((16, TILES), (64, TALL_TILES)):
        chosen = astuple(tile_config(width, product.depth, count, sms, matrices))
        best_of(f"{product.name} T{count}", tiles, chosen, partial(exact, count), late)
    chosen = astuple(row_config(width, product.depth, sms, matrices))
    best_of(f"{product.name} one row", ROW_TILES, chosen, one_row, late)


def section_sweep(bandwidth: float, late: Late) -> None:
    """Blocks of the products: rows, columns, depth, warps, stages; columns, depth, warps for one row."""
    for product in PRODUCTS[:5]:
        sweep_product(product, late)


SECTIONS: dict[str, Callable[[float, Late], None]] = {
    "products": section_products,
    "rows": section_rows,
    "router": section_router,
    "attention": section_attention,
    "prompt": section_prompt,
}


def main() -> None:
    """Run the sections; one that fails prints its error and lets the next run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "sweep"])
    parser.add_argument("--sweep", action="store_true", help="blocks of the products instead of the sections")
    parser.add_argument("--seconds", type=float, default=140.0, help="no new measurement starts after this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device.")
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    begin = time.perf_counter()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s (read and written)")
    for name in args.only or (["sweep"] if args.sweep else SECTIONS):
        print(f"{name}, us (at {time.perf_counter() - begin:.0f} s)", flush=True)
        try:
            section = section_sweep if name == "sweep" else SECTIONS[name]
            section(bandwidth, lambda: time.perf_counter() - begin > args.seconds)
        except Exception:  # the other sections are still worth having
            traceback.print_exc(limit=4, file=sys.stdout)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
