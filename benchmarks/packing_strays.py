"""How many strays matrices in BF12 have (kernels.bf12_tiles), by the distribution of their weights, beside
how many a strip of 16 rows has room for: how far weights may be from normal before a model stays in 16 bits.

    python benchmarks/packing_strays.py [--model demo] [--rows 512]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.engine.sources import CheckpointSource
from localmoe.kernels import bf12_tiles
from localmoe.kernels.bf12_tiles import NOWHERE, TILE_ROWS, Bf12Matrix
from localmoe.model.skeleton import build_skeleton

COLUMNS = (768, 2048, 4096)
SPREAD = 0.02
CHANCE = torch.Generator().manual_seed(0)


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=CHANCE)


def laplace(rows: int, columns: int) -> Tensor:
    uniform = torch.rand(rows, columns, generator=CHANCE) - 0.5
    return -torch.sign(uniform) * torch.log1p(-2 * uniform.abs())


def student(freedom: int) -> Callable[[int, int], Tensor]:
    def draw(rows: int, columns: int) -> Tensor:
        squares = torch.stack([normal(rows, columns) ** 2 for _ in range(freedom)])
        return normal(rows, columns) / squares.mean(0).sqrt()

    return draw


def giant_columns(share: float, times: float) -> Callable[[int, int], Tensor]:
    def draw(rows: int, columns: int) -> Tensor:
        weights = normal(rows, columns)
        weights[:, torch.rand(columns, generator=CHANCE) < share] *= times
        return weights

    return draw


def scattered_columns(spread: float) -> Callable[[int, int], Tensor]:
    """Scales of columns are log-normal."""

    def draw(rows: int, columns: int) -> Tensor:
        return normal(rows, columns) * torch.exp(spread * torch.randn(columns, generator=CHANCE))

    return draw


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": normal,
    "Laplace": laplace,
    "Student, 5 degrees of freedom": student(5),
    "Student, 3": student(3),
    "Student, 2": student(2),
    "normal, 1 % of the columns 16 times as large": giant_columns(0.01, 16),
    "normal, 1 % of the columns 64 times as large": giant_columns(0.01, 64),
    "normal, columns' scales scatter by e^0.5": scattered_columns(0.5),
    "normal, columns' scales scatter by e": scattered_columns(1.0),
}


def counts_of(weights: Tensor) -> list[int]:
    """Strays of each strip, however many there are."""
    rows, columns = weights.shape
    strips = rows // TILE_ROWS
    codes = torch.zeros(bf12_tiles.code_bytes(rows, columns), dtype=torch.uint8)
    side = torch.zeros(4 * bf12_tiles.side_words(rows, columns), dtype=torch.uint8)
    small = Bf12Matrix.at(codes, side, rows, columns)
    places = torch.zeros(strips, TILE_ROWS * columns, dtype=torch.int32)
    matrix = Bf12Matrix(small.codes, small.scales, places, torch.zeros(places.shape))
    matrix.put(0, weights)
    found: list[int] = (places != NOWHERE).sum(1).tolist()
    return found


def of_model(name: str) -> None:
    """All experts of a model's layers that can be packed."""
    source = CheckpointSource.open(name)
    skeleton = build_skeleton(source.checkpoint, source.stored_dtype)
    store = source.load_weights(skeleton, torch.device("cpu"), progress=None, cancel=None)
    counts, weights = [], 0
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            for matrix in store.views(ExpertKey(layer, expert)):
                counts += counts_of(matrix.contiguous())
                weights += matrix.numel()
    print(f"{name}: one stray in {weights / max(1, sum(counts)):.0f} weights, at most {max(counts)} a strip")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    for kind, draw in KINDS.items():
        parts = []
        for columns in COLUMNS:
            counts = counts_of((draw(args.rows, columns) * SPREAD).to(torch.bfloat16))
            rate = args.rows * columns / max(1, sum(counts))
            room = bf12_tiles.stray_room(columns)
            parts.append(f"{columns} columns: one in {rate:.0f}, at most {max(counts)} of {room}")
        print(f"{kind}: " + "; ".join(parts), flush=True)
    of_model(args.model)


if __name__ == "__main__":
    main()
