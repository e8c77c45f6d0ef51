"""What a step's linear layers gain, or would gain, from weights packed in twelve bits instead of sixteen, by
the kernels that output heads have (kernels.gpu.packed_linear), in several blocks. First whether these are
right.

Times are microseconds a call inside a CUDA graph over more weights than caches hold; "floor" is bytes read /
copy bandwidth measured in the same run. Without a CUDA device only the check runs, interpreted.

    python benchmarks/packed_linear.py [--seconds 120]
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from dense_kernels import DEVICE, copy_bandwidth, error_of, graph_us
from torch import Tensor

from localmoe.kernels.gpu.linear import gemv, linear
from localmoe.kernels.gpu.packed_linear import OneRow, Tile, packed_linear, packed_row
from localmoe.kernels.packed_weight import PackedWeight, packed_bytes

COLD_BYTES = 200_000_000
PTX = torch.cuda.is_available()
SHAPES = {
    "qwen1.5 q/k/v": (6144, 2048), "qwen1.5 o": (2048, 2048), "qwen1.5 shared gate_up": (11_264, 2048),
    "qwen1.5 shared down": (2048, 5632), "qwen1.5/3 head": (151_936, 2048), "gpt-oss q/k/v": (5120, 2880),
    "gpt-oss o": (2880, 4096), "gpt-oss head": (201_088, 2880), "mixtral o": (4096, 4096),
}  # fmt: skip
TILES = [
    Tile(16, 1, 64, 1, 5), Tile(16, 2, 64, 2, 5), Tile(16, 1, 128, 2, 3), Tile(16, 2, 128, 2, 3),
    Tile(16, 2, 128, 4, 3), Tile(16, 4, 128, 4, 3), Tile(16, 1, 256, 4, 3),
    Tile(32, 2, 64, 2, 5), Tile(32, 4, 64, 4, 4), Tile(64, 2, 64, 2, 4),
]  # fmt: skip
ONE_ROWS = [
    OneRow(2, 2048, 2),
    OneRow(4, 1024, 2),
    OneRow(4, 1024, 4),
    OneRow(4, 2048, 4),
    OneRow(8, 1024, 4),
]


def packed(weight: Tensor) -> PackedWeight:
    """A matrix as kernels read it."""
    rows, columns = weight.shape
    made = PackedWeight.empty(rows, columns, weight.device)
    made.put(0, weight.cpu())
    return made


def copies(weight: PackedWeight, count: int) -> list[PackedWeight]:
    """Others in memory of their own."""
    return [replace(weight, memory=weight.memory.clone()) for _ in range(count)]


def weights_of(rows: int, columns: int, device: torch.device, *, rare: bool) -> Tensor:
    """bfloat16; with `rare`, some strays more than are read at once."""
    made = torch.randn(rows, columns, device=device) * columns**-0.5
    if rare:
        made.view(-1)[:: 251 if columns < 1024 else 1009] *= 2.0**-30
    weights: Tensor = made.to(torch.bfloat16)
    return weights


def check(device: torch.device) -> None:
    """Against float64, all tiles and one-row blocks, matrices whose columns are no whole turns too."""
    torch.manual_seed(0)
    for rows, columns in ((96, 320), (64, 2880)) if PTX else ((48, 320),):
        weight = weights_of(rows, columns, device, rare=True)
        matrix = packed(weight)
        assert (matrix.side[rows:] >= 0).sum() > 0
        x = torch.randn(33, columns, device=device).to(torch.bfloat16)
        exact = x.double() @ weight.double().T
        for tile in TILES:
            found = packed_linear(x, matrix, out_dtype=torch.float32, tile=tile)
            error = error_of(found, exact)
            assert error < 1e-5, (rows, columns, tile, error)
            alone = packed_linear(x[5:6], matrix, out_dtype=torch.float32, tile=tile)
            assert torch.equal(alone, found[5:6]) or not PTX, ("a row's bits depend on others", tile)
        for how in ONE_ROWS:
            one = packed_row(x[:1], matrix, out_dtype=torch.float32, blocks=how)
            error = error_of(one, exact[:1])
            assert error < 1e-5, (rows, columns, how, error)
    print("all tiles are right", flush=True)


def measure(name: str, rows: int, columns: int, bandwidth: float) -> None:
    """16 bits, and packed by the best tiles, for one row in any order and for 1 to 72 rows exactly."""
    count = min(24, max(2, -(-COLD_BYTES // packed_bytes(rows, columns))))
    weight = weights_of(rows, columns, DEVICE, rare=False)
    weights = [weight.clone() for _ in range(count)]
    matrices = copies(packed(weight), count)
    x = torch.randn(72, columns, device=DEVICE).to(torch.bfloat16)
    floor = [size / bandwidth * 1e6 for size in (2 * rows * columns, packed_bytes(rows, columns))]
    print(f"{name:23s} floor {floor[0]:6.1f} in 16 bits, {floor[1]:6.1f} packed")

    def one_row(how: OneRow) -> float:
        return graph_us(lambda matrix: packed_row(x[:1], matrix, blocks=how), matrices, 7)

    def exact(tokens: int, tile: Tile) -> float:
        return graph_us(lambda matrix: packed_linear(x[:tokens], matrix, tile=tile), matrices, 7)

    plain = graph_us(lambda matrix: gemv(x[:1], matrix), weights)
    best_us, how = min(((one_row(how), how) for how in ONE_ROWS), key=lambda pair: pair[0])
    print(f"  one row  {plain:6.1f} in 16 bits, {best_us:6.1f} packed by {how}")
    for tokens in (1, 9, 16, 33, 72):
        x_rows = x[:tokens]
        plain = graph_us(functools.partial(linear, x_rows), weights)
        best_us, tile = min(((exact(tokens, tile), tile) for tile in TILES), key=lambda pair: pair[0])
        print(f"  {tokens:2d} exact {plain:6.1f} in 16 bits, {best_us:6.1f} packed by {tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    seconds = parser.parse_args().seconds
    started = time.perf_counter()
    check(DEVICE if PTX else torch.device("cpu"))
    if not PTX:
        return
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e9:.0f} GB/s")
    for name, (rows, columns) in SHAPES.items():
        if time.perf_counter() - started > seconds:
            print("(out of time)")
            break
        measure(name, rows, columns, bandwidth)


if __name__ == "__main__":
    main()
