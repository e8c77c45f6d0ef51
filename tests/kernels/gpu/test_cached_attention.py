"""Attention over the cache against float64: both ways of cutting the work, every masking rule, caches full of
NaN beyond what is live."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from dense_cases import DEVICE, DTYPES, in_nan, normal, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.dense import reference_attention
from localmoe.kernels.gpu import attention as module
from localmoe.kernels.gpu.attention import attention, chunk_positions, num_slots


@dataclass(frozen=True)
class Case:
    """`start` positions are cached, `rows` more ask; the cache and the launch have room for more."""

    heads: int = 4
    kv_heads: int = 2
    rows: int = 3
    start: int = 140
    spare: int = 150
    dim: int = 32
    value_dim: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0
    dtype: torch.dtype = DTYPES[0]
    pictures: tuple[tuple[int, int], ...] = ()  # rows (first, end) that see each other

    def check(self, score_scale: float = 1.0) -> Tensor:
        """Compare with float64 and return the result."""
        live = self.start + self.rows
        query = in_nan(
            normal(1, self.rows, self.heads, self.dim, dtype=self.dtype, seed=self.seed)
        ).transpose(1, 2)
        caches = []
        for i, dim in enumerate((self.dim, self.value_dim)):
            cache = torch.full((1, self.kv_heads, live + self.spare, dim), torch.nan, dtype=self.dtype)
            cache[:, :, :live] = normal(1, self.kv_heads, live, dim, dtype=self.dtype, seed=self.seed + 1 + i)
            caches.append(cache.to(DEVICE))
        key, value = caches
        sinks = normal(self.heads, dtype=self.dtype, seed=self.seed + 3, scale=3.0) if self.sinks else None
        start = torch.tensor([self.start], device=DEVICE)
        scale = score_scale * self.dim**-0.5
        until = None
        if self.pictures:
            until = torch.arange(self.rows, dtype=torch.int32, device=DEVICE)
            for first, end in self.pictures:
                until[first:end] = end - 1
        out = attention(
            query, key, value, start, scale=scale, max_length=live + self.spare,
            window=self.window, softcap=self.softcap, sinks=sinks, until=until,
        )  # fmt: skip
        exact = reference_attention(
            query.double(), key.double(), value.double(), start, scale=scale,
            window=self.window, softcap=self.softcap, sinks=None if sinks is None else sinks.double(),
            until=until,
        )  # fmt: skip
        assert out.shape == (self.rows, self.heads, self.value_dim) and out.is_contiguous()
        assert not out.isnan().any()
        # weights and result are rounded to the dtype: errors are a few steps of the largest value
        error = (out.double() - exact).abs().max().item()
        assert error < 3 * torch.finfo(self.dtype).eps, f"{self}: off by {error}"
        return out


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few rows go through partial results of chunks, of sections, or the loop."""
    if way != "chunks":
        monkeypatch.setattr(module, "CHUNK_PARTIAL_BYTES", 0)
    if way == "loop":
        monkeypatch.setattr(module, "SECTION_PARTIAL_BYTES", 0)


@pytest.fixture(params=["chunks", "loop"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take(request.param, monkeypatch)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case(start=0, rows=1),
        Case(start=127, rows=1, heads=1, kv_heads=1),
        Case(start=128, rows=9, heads=16),
        Case(start=120, rows=40, heads=3, kv_heads=1),
        Case(start=300, rows=17, heads=2, spare=0),
        Case(start=1290, rows=1, spare=1000),  # more chunks than are merged at once
        Case(dim=80, value_dim=80),
        Case(dim=192, value_dim=128, start=70),
        Case(dim=256, value_dim=256, heads=2, start=70),
        Case(dim=512, value_dim=512, heads=2, start=70),
        Case(dim=24, value_dim=8),
        Case(window=1),
        Case(window=100, rows=7),
        Case(window=128, rows=33, start=128, heads=2, kv_heads=1),
        Case(window=129, start=900, spare=300),
        Case(window=100, rows=60, start=200, heads=1, kv_heads=1),  # rows begin in different chunks
        Case(window=1000),
        Case(softcap=0.8),
        Case(softcap=30.0, window=64),
        Case(sinks=True),
        Case(sinks=True, window=20, start=260, rows=5),
        Case(window=20, start=0, rows=40, pictures=((0, 30),)),
        Case(window=20, start=100, rows=60, heads=8, pictures=((0, 5), (12, 50), (50, 59))),
        Case(window=150, start=250, rows=9, pictures=((2, 9),), sinks=True, softcap=5.0),
        Case(window=16, start=120, rows=90, dim=256, value_dim=256, heads=2, pictures=((3, 88),)),
    ],
    ids=str,
)
def test_attention_is_that_of_float64(case: Case, dtype: torch.dtype) -> None:
    Case(**{**{name: getattr(case, name) for name in case.__dataclass_fields__}, "dtype": dtype}).check()


@settings(max_examples=6)
@given(
    group=st.integers(1, 5), kv_heads=st.integers(1, 3), rows=st.integers(1, 12), start=st.integers(0, 400),
    spare=st.integers(0, 300), dim=st.integers(1, 40), value_dim=st.integers(1, 40),
    window=st.none() | st.integers(1, 500), softcap=st.none() | st.floats(0.5, 50.0), sinks=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_attention_of_any_shape(
    group: int, kv_heads: int, rows: int, start: int, spare: int, dim: int, value_dim: int,
    window: int | None, softcap: float | None, sinks: bool, seed: int,
) -> None:  # fmt: skip
    Case(group * kv_heads, kv_heads, rows, start, spare, dim, value_dim, window, softcap, sinks, seed).check()


@settings(max_examples=6)
@given(
    group=st.integers(1, 5), rows=st.integers(1, 70), start=st.integers(0, 300), window=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 70), max_size=6), seed=st.integers(0, 1000),
)  # fmt: skip
def test_rows_of_pictures_see_each_other(
    group: int, rows: int, start: int, window: int, cuts: list[int], seed: int
) -> None:
    edges = sorted({min(cut, rows) for cut in cuts})
    pictures = tuple(zip(edges[::2], edges[1::2], strict=False))
    Case(2 * group, 2, rows, start, window=window, seed=seed, pictures=pictures).check()


@pytest.mark.usefixtures("way")
def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    Case(start=400).check(score_scale=40.0)
    Case(start=400, sinks=True).check(score_scale=40.0)


@pytest.mark.parametrize(
    "case",
    [
        Case(start=1290, rows=3, spare=700),
        Case(start=500, rows=24, heads=2),  # rows end in different sections
        Case(window=100, rows=60, start=470, heads=1, kv_heads=1, sinks=True),  # and begin in different ones
        Case(window=300, start=700),  # from the end of a section on
        Case(dim=192, value_dim=128, start=330, spare=0, window=700),
    ],
    ids=str,
)
def test_every_way_merges_in_the_same_order(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of one height the interpreter's products are the same, so the bits are, too: of 32, as
    rounding to 16 would hide most of another order."""
    monkeypatch.setattr(module, "_LOOP_TILE", module._SPLIT_TILE)
    monkeypatch.setattr(module, "_section_tile", lambda *_: (module._SPLIT_TILE, 4))
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **o: poisoned_empty(*shape, **{**o, "dtype": torch.float32})
    )
    results = []
    for way in ("chunks", "sections", "loop"):
        take(way, monkeypatch)
        results.append(case.check())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_the_way_follows_the_rows_and_what_partial_results_take(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[int] = []  # chunks that a program of the split reads
    split, loop = module._split, module._loop
    monkeypatch.setattr(module, "_split", lambda *args: (ways.append(args[-1]), split(*args))[1])
    monkeypatch.setattr(module, "_loop", lambda *args: (ways.append(0), loop(*args))[1])
    one = Case(rows=1, start=0, heads=1, kv_heads=1)
    Case(rows=81, start=0, heads=1, kv_heads=1).check()
    Case(rows=80, start=0, heads=1, kv_heads=1).check()
    monkeypatch.setattr(module, "CHUNK_PARTIAL_BYTES", 4 * 2 * (32 + 2) - 1)  # a byte less than two chunks
    one.check()
    monkeypatch.setattr(module, "SECTION_PARTIAL_BYTES", 4 * (32 + 2) - 1)
    one.check()
    assert ways == [0, 1, module.SECTION, 0]


def test_a_window_bounds_the_chunks() -> None:
    for window in (1, 2, 127, 128, 129, 300):
        for rows in (1, 2, 16, 80):
            seen = [
                (start + rows - 1) // 128 - max(0, start - window + 1) // 128 + 1 for start in range(1000)
            ]
            assert max(seen) == num_slots(rows, 1 << 20, window, 128)
    assert num_slots(80, 130, 128, 128) == 2
    assert (chunk_positions(128, 128), chunk_positions(192, 128), chunk_positions(64, 256)) == (128, 64, 64)
