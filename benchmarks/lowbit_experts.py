"""The draft's low-bit expert kernels on a GPU: are they right, and how near to the memory's speed are they?

    python benchmarks/lowbit_experts.py [--shapes qwen1.5-moe,...] [--sweep SHAPE,...]

Each case is first compared with float64, then timed in a CUDA graph of 24 calls over several layers, so that
no call finds its codes in the L2 cache. Prints microseconds a layer, GB/s of the codes and scales of the
distinct chosen experts, and their share of the copy bandwidth measured in the same run. A case that fails
prints its error, and the next one follows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from localmoe.core.draft_config import NF4_GROUP_SIZE
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.lowbit_experts import Tile, choose_down_tile, choose_gate_up_tile, lowbit_moe
from localmoe.kernels.lowbit import LowBitExperts

CALLS = 24
LAYER_BYTES = 2 << 30  # codes of all layers together, at least three layers
GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class Case:
    """One model's experts, as many bits, as many tokens at once."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    biased: bool = False
    bits: int = 4
    tokens: int = 1
    codebook: bool = False  # as NF4: a table of values, groups of 64

    @property
    def activation(self) -> Activation:
        """GPT-OSS's own where there are biases, else silu."""
        return Activation("swiglu_oai", 1.702, 7.0) if self.biased else Activation("silu")

    def experts(self, generator: torch.Generator) -> LowBitExperts:
        """One layer of random codes."""
        gate_up, down = (
            torch.empty(self.num_experts, n, device="cuda") if self.biased else None
            for n in (2 * self.inner, self.hidden)
        )
        sizes = (self.num_experts, self.hidden, self.inner)
        group_size = NF4_GROUP_SIZE if self.codebook else GROUP_SIZE
        made = LowBitExperts.empty(
            *sizes,
            self.bits,
            group_size,
            "cuda",
            gate_up_bias=gate_up,
            down_bias=down,
            codebook=self.codebook,
        )
        return made.random_(generator)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, index, weights."""
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(self.tokens, self.hidden, device="cuda", generator=generator).bfloat16()
        scores = torch.rand(self.tokens, self.num_experts, device="cuda", generator=generator)
        weights, index = scores.topk(self.top_k)
        return x, index, weights


SHAPES = {
    case.name: case
    for case in (
        Case("qwen1.5-moe", 2048, 1408, 60, 4),
        Case("qwen3-30b-a3b", 2048, 768, 128, 8),
        Case("phi-3.5-moe", 4096, 6400, 16, 2),
        Case("mixtral-8x7b", 4096, 14336, 8, 2),
        Case("deepseek-v2-lite", 2048, 1408, 64, 6),
        Case("gpt-oss-20b", 2880, 2880, 32, 4, biased=True),
    )
}


def cases_of(shape: Case) -> list[Case]:
    """One token of every shape; of Qwen1.5 also more tokens, the other widths and NF4."""
    if shape.name != "qwen1.5-moe":
        return [shape]
    plain = [replace(shape, tokens=t) for t in (1, 4, 16)] + [replace(shape, bits=b) for b in (2, 3, 8)]
    return plain + [replace(shape, tokens=t, codebook=True) for t in (1, 4, 16)]


def graph_us(body: Callable[[], object], repeats: int = 15) -> float:
    """Median microseconds of a replay."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times[3:]))


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, reads and writes counted."""
    source, target = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / graph_us(lambda: target.copy_(source)) / 1e3


def relative_error(case: Case, experts: LowBitExperts) -> float:
    """Of the kernels against float64, both from the same bfloat16 input."""
    x, index, weights = case.inputs(seed=1)
    got = lowbit_moe(x, experts, index, weights, activation=case.activation).double()
    wanted = torch.zeros_like(got)
    for token, chosen in enumerate(index.tolist()):
        for k, expert in enumerate(chosen):
            gate_up, down = (matrix.double() for matrix in experts.dequantize(expert))
            products = gate_up @ x[token].double()
            if experts.gate_up_bias is not None:
                products += experts.gate_up_bias[expert].double()
            y = down @ case.activation.apply(*products.chunk(2))
            if experts.down_bias is not None:
                y += experts.down_bias[expert].double()
            wanted[token] += weights[token, k].double() * y
    return float((got - wanted).norm() / wanted.norm())


class Run:
    """The layers and inputs of a case, and how long a layer takes with given tiles."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator("cuda").manual_seed(0)
        self.layers = [case.experts(generator)]
        while len(self.layers) < CALLS and (
            len(self.layers) < 3 or (len(self.layers) + 1) * self.layers[0].num_bytes <= LAYER_BYTES
        ):
            self.layers.append(case.experts(generator))
        self.calls = [case.inputs(seed) for seed in range(CALLS)]

    @property
    def layer_bytes(self) -> float:
        """Codes and scales of the distinct experts of a call, on average."""
        distinct = statistics.mean(index.unique().numel() for _, index, _ in self.calls)
        return float(distinct * self.layers[0].num_bytes / self.case.num_experts)

    def layer_us(self, gate_up: Tile | None = None, down: Tile | None = None) -> float:
        """Microseconds a layer: two kernels."""

        def body() -> None:
            for call, (x, index, weights) in enumerate(self.calls):
                lowbit_moe(
                    x, self.layers[call % len(self.layers)], index, weights,
                    activation=self.case.activation, gate_up_tile=gate_up, down_tile=down,
                )  # fmt: skip

        return graph_us(body) / CALLS


def measure(case: Case, bandwidth: float) -> None:
    """Print one line."""
    run = Run(case)
    error = relative_error(case, run.layers[0])
    verdict = "ok" if error < 1e-2 else "WRONG"
    us = run.layer_us()
    rate = run.layer_bytes / us / 1e3
    codes = "nf4" if case.codebook else f"{case.bits} bit"
    print(
        f"{case.name:17} {codes:5} T={case.tokens:<2} {us:8.2f} us a layer {rate:6.0f} GB/s "
        f"{rate / bandwidth:5.0%} of copy   floor {run.layer_bytes / bandwidth / 1e3:7.2f} us   "
        f"error {error:.1e} {verdict}",
        flush=True,
    )


def gate_up_tiles(base: Tile) -> list[Tile]:
    """At most 12, around the built-in one."""
    sizes = [(2, 32, 1), (2, 32, 2), (4, 32, 1), (4, 32, 2), (4, 32, 4), (8, 32, 1), (8, 32, 2), (2, 64, 1)]
    tiles = [base, *(Tile(*size) for size in [*sizes, (4, 64, 1), (8, 64, 1), (4, 128, 1)])]
    return list(dict.fromkeys(tiles))


def down_tiles(base: Tile) -> list[Tile]:
    """At most 12, around the built-in one."""
    shapes = [
        (2, 1, 3),
        (2, 1, 6),
        (4, 1, 1),
        (4, 1, 2),
        (4, 1, 6),
        (8, 1, 1),
        (8, 1, 3),
        (4, 2, 1),
        (4, 2, 2),
    ]
    tiles = [Tile(rows, base.vectors * wider, depth) for rows, wider, depth in shapes]
    return list(dict.fromkeys([base, *tiles, Tile(8, base.vectors * 2, 1), Tile(1, base.vectors, 3)]))


def sweep(case: Case) -> None:
    """Print microseconds a layer for tiles of one kernel, the other's built in, and the best."""
    run = Run(case)
    gate_up, down = choose_gate_up_tile(run.layers[0]), choose_down_tile(run.layers[0], case.top_k)
    for name, tiles in (("gate_up", gate_up_tiles(gate_up)), ("down", down_tiles(down))):
        found: list[tuple[float, Tile]] = []
        for tile in tiles:
            try:
                us = run.layer_us(tile, down) if name == "gate_up" else run.layer_us(gate_up, tile)
            except Exception as error:  # a tile that does not fit the device must not end the sweep
                print(f"  {name} {tile}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            found.append((us, tile))
        found.sort(key=lambda pair: pair[0])
        print(f"{case.name} {name}, built in {gate_up if name == 'gate_up' else down}:")
        for us, tile in found:
            print(f"  {us:8.2f} us  rows {tile.rows} vectors {tile.vectors} depth {tile.depth}", flush=True)


def guarded(what: str, section: Callable[[], None]) -> None:
    """Run a section; print its error and go on."""
    try:
        section()
    except Exception as error:  # the remaining sections are worth having
        print(f"{what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated; empty for none")
    parser.add_argument("--sweep", nargs="?", const="qwen1.5-moe", default="", help="shapes to try tiles for")
    args = parser.parse_args()
    start = time.perf_counter()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.0f} GB/s, groups of {GROUP_SIZE}")
    for name in filter(None, args.shapes.split(",")):
        for case in cases_of(SHAPES[name]):
            guarded(f"{case}", partial(measure, case, bandwidth))
    for name in filter(None, args.sweep.split(",")):
        guarded(f"sweep of {name}", partial(sweep, SHAPES[name]))
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
