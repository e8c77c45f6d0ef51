"""What a step's linear layers would gain from weights packed in twelve bits (kernels.bf12_tiles) instead of
sixteen: trial kernels, which no engine uses, beside those that it does use. First whether they are right.

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
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl
from dense_kernels import DEVICE, copy_bandwidth, error_of, graph_us
from torch import Tensor

from localmoe.kernels.bf12_tiles import Bf12Matrix, code_bytes, num_bytes, side_words, stray_room
from localmoe.kernels.gpu import bf12_weights as bf12
from localmoe.kernels.gpu.linear import gemv, linear

COLD_BYTES = 200_000_000
PTX = torch.cuda.is_available()
SHAPES = {
    "qwen1.5 q/k/v": (6144, 2048), "qwen1.5 o": (2048, 2048), "qwen1.5 shared gate_up": (11_264, 2048),
    "qwen1.5 shared down": (2048, 5632), "qwen1.5/3 head": (151_936, 2048), "gpt-oss q/k/v": (5120, 2880),
    "gpt-oss o": (2880, 4096), "gpt-oss head": (201_088, 2880), "mixtral o": (4096, 4096),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of x, strips of sixteen weight rows, columns of a turn, warps, stages of the pipeline."""

    rows: int
    strips: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class OneRow:
    """Rows of a strip that a program takes, columns of a turn, warps."""

    rows: int
    depth: int
    warps: int


TILES = [
    Tile(16, 1, 64, 1, 5), Tile(16, 2, 64, 2, 5), Tile(16, 1, 128, 2, 3), Tile(16, 2, 128, 2, 3),
    Tile(16, 2, 128, 4, 3), Tile(16, 4, 128, 4, 3), Tile(16, 1, 256, 4, 3),
]  # fmt: skip
ONE_ROWS = [
    OneRow(2, 2048, 2),
    OneRow(4, 1024, 2),
    OneRow(4, 1024, 4),
    OneRow(4, 2048, 4),
    OneRow(8, 1024, 4),
]


@triton.jit  # type: ignore[untyped-decorator]
def _words_at(n, K: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the first plane's words (N, BK / 8) of rows n are, of columns 0 to BK."""
    word = tl.arange(0, BK // 8)
    strip = n // 16 * (K // 64 * 384) + n % 16 * 8
    return strip[:, None] + (word // 8 * 384 + word % 8)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _planes(words, first, K: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Three planes' words of BK columns, those past the end zero. words: pointers of columns `first` on."""
    if K % BK == 0:
        a = tl.load(words, eviction_policy="evict_first")
        b = tl.load(words + 128, eviction_policy="evict_first")
        c = tl.load(words + 256, eviction_policy="evict_first")
    else:
        there = (first + tl.arange(0, BK // 8) * 8 < K)[None, :]
        a = tl.load(words, mask=there, other=0, eviction_policy="evict_first")
        b = tl.load(words + 128, mask=there, other=0, eviction_policy="evict_first")
        c = tl.load(words + 256, mask=there, other=0, eviction_policy="evict_first")
    return a, b, c


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _packed(  # type: ignore[no-untyped-def]
    x, codes, side, y, rows, x_row,
    R: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, STRIPS: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = 16 * STRIPS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = m < rows
    n_read = tl.where(n < R, n, 0)
    k = tl.arange(0, BK)
    x_rows = x + m.to(tl.int64) * x_row
    words = codes + _words_at(n_read, K, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.load(
            x_rows[:, None] + (start + k)[None, :], mask=ok[:, None] & (start + k < K)[None, :], other=0.0
        )
        first, second, upper = _planes(words + start * 6, start, K, BK)
        acc = bf12.dot(a, tl.trans(bf12.decode(first, second, upper, BK, PTX)), acc, PTX)
    acc = acc * tl.load(side + n_read).to(tl.float32, bitcast=True)[None, :]
    for s in tl.static_range(STRIPS):
        strip = tl.program_id(1) * STRIPS + s
        part = 0
        left = strip * 16 < R
        while left:
            places, values = bf12.load_strays(side, side, strip, part, R, S, False)
            there = places >= 0
            column = places & 0xFFFF
            stray = tl.load(x_rows[:, None] + column[None, :], mask=ok[:, None] & there[None, :], other=0.0)
            here = ((places >> 16) + 16 * s)[:, None] == tl.arange(0, BN)[None, :]
            weights = tl.where(here & there[:, None], values[:, None], 0.0).to(stray.dtype)
            acc = bf12.dot(stray, weights, acc, PTX)
            part += 1
            left = (part < S // 16) & (tl.min(places, 0) >= 0)
    at = m[:, None].to(tl.int64) * R + n[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok[:, None] & (n < R)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _packed_row(  # type: ignore[no-untyped-def]
    x, codes, side, y,
    R: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    strip = tl.program_id(0) * BN // 16
    places, values = bf12.load_strays(side, side, strip, 0, R, S, False)
    words = codes + _words_at(n, K, BK)
    k = tl.arange(0, BK)
    sums = tl.zeros([BN, BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        a = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        first, second, upper = _planes(words + start * 6, start, K, BK)
        sums += a[None, :] * bf12.decode(first, second, upper, BK, PTX).to(tl.float32)
    total = tl.sum(sums, 1) * tl.load(side + n).to(tl.float32, bitcast=True)
    part = 0
    left = True
    while left:
        stray = tl.load(x + (places & 0xFFFF), mask=places >= 0, other=0.0).to(tl.float32)
        here = (places[None, :] >= 0) & ((places >> 16)[None, :] == (n % 16)[:, None])
        total += tl.sum(tl.where(here, (stray * values)[None, :], 0.0), 1)
        part += 1
        left = (part < S // 16) & (tl.min(places, 0) >= 0)
        if left:
            places, values = bf12.load_strays(side, side, strip, part, R, S, False)
    tl.store(y + n, total.to(y.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix (rows, columns) on the device: its tiles, and what lies beside them."""

    codes: Tensor
    side: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        rows, columns = weight.shape
        codes = torch.empty(code_bytes(rows, columns), dtype=torch.uint8)
        side = torch.empty(4 * side_words(rows, columns), dtype=torch.uint8)
        Bf12Matrix.at(codes, side, rows, columns).put(0, weight.cpu())
        device = weight.device
        return cls(codes.view(torch.int32).to(device), side.view(torch.int32).to(device), rows, columns)

    def copies(self, count: int) -> list[Packed]:
        return [Packed(self.codes.clone(), self.side.clone(), self.rows, self.columns) for _ in range(count)]

    def many(self, x: Tensor, tile: Tile, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x (T, columns) times it."""
        y = torch.empty(len(x), self.rows, dtype=dtype, device=x.device)
        grid = (triton.cdiv(len(x), tile.rows), triton.cdiv(self.rows, 16 * tile.strips))
        _packed[grid](
            x, self.codes, self.side, y, len(x), x.stride(0), R=self.rows, K=self.columns,
            S=stray_room(self.columns), BM=tile.rows, STRIPS=tile.strips, BK=tile.depth, STAGES=tile.stages,
            PTX=PTX, num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return y

    def one(self, x: Tensor, how: OneRow, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x (1, columns) times it."""
        y = torch.empty(1, self.rows, dtype=dtype, device=x.device)
        _packed_row[(self.rows // how.rows,)](
            x, self.codes, self.side, y, R=self.rows, K=self.columns, S=stray_room(self.columns),
            BN=how.rows, BK=how.depth, PTX=PTX, num_warps=how.warps,
        )  # fmt: skip
        return y


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
        packed = Packed.of(weight)
        assert (packed.side[rows:] >= 0).sum() > 0
        x = torch.randn(33, columns, device=device).to(torch.bfloat16)
        exact = x.double() @ weight.double().T
        for tile in TILES:
            found = packed.many(x, tile, torch.float32)
            error = error_of(found, exact)
            assert error < 1e-5, (rows, columns, tile, error)
            alone = packed.many(x[5:6], tile, torch.float32)
            assert torch.equal(alone, found[5:6]) or not PTX, ("a row's bits depend on others", tile)
        for how in ONE_ROWS:
            error = error_of(packed.one(x[:1], how, torch.float32), exact[:1])
            assert error < 1e-5, (rows, columns, how, error)
    print("all tiles are right", flush=True)


def measure(name: str, rows: int, columns: int, bandwidth: float) -> None:
    """16 bits, and packed by the best tiles, for one row in any order and for 1, 9 and 16 rows exactly."""
    count = min(24, max(2, -(-COLD_BYTES // num_bytes(rows, columns))))
    weight = weights_of(rows, columns, DEVICE, rare=False)
    weights = [weight.clone() for _ in range(count)]
    packed = Packed.of(weight).copies(count)
    x = torch.randn(16, columns, device=DEVICE).to(torch.bfloat16)
    floor = [size / bandwidth * 1e6 for size in (2 * rows * columns, num_bytes(rows, columns))]
    print(f"{name:23s} floor {floor[0]:6.1f} in 16 bits, {floor[1]:6.1f} packed")

    def one_row(how: OneRow) -> float:
        return graph_us(lambda matrix: matrix.one(x[:1], how), packed, 7)

    def exact(tokens: int, tile: Tile) -> float:
        return graph_us(lambda matrix: matrix.many(x[:tokens], tile), packed, 7)

    plain = graph_us(lambda matrix: gemv(x[:1], matrix), weights)
    best_us, how = min(((one_row(how), how) for how in ONE_ROWS), key=lambda pair: pair[0])
    print(f"  one row  {plain:6.1f} in 16 bits, {best_us:6.1f} packed by {how}")
    for tokens in (1, 9, 16):
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
