"""Attention over latent vectors against float64 and against the expanded way: both ways of cutting the work,
caches full of NaN beyond what is live, no more workspace than is planned for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from dense_cases import DEVICE, DTYPES, assert_rounded, in_nan, normal, poisoned_empty
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.hardware.needs import _KERNEL_ATTENTION_BYTES
from localmoe.kernels.dense import reference_latent_attention
from localmoe.kernels.gpu import latent_attention as module
from localmoe.kernels.gpu.attention import SECTION_PARTIAL_BYTES, attention
from localmoe.kernels.gpu.head_linear import head_linear
from localmoe.kernels.gpu.latent_attention import PART, latent_attention
from localmoe.kernels.gpu.linear import linear


@dataclass(frozen=True)
class Case:
    """`start` positions are cached, `rows` more ask; the cache and the launch have room for more."""

    heads: int = 4
    rows: int = 3
    start: int = 300
    spare: int = 150
    rank: int = 64
    rope: int = 16
    plain: int = 32
    value_dim: int = 32
    seed: int = 0
    dtype: torch.dtype = DTYPES[0]

    @property
    def scale(self) -> float:
        return (self.plain + self.rope) ** -0.5

    def cache(self, dim: int, seed: int) -> Tensor:
        live = self.start + self.rows
        cache = torch.full((1, 1, live + self.spare, dim), torch.nan, dtype=self.dtype)
        cache[:, :, :live] = normal(1, 1, live, dim, dtype=self.dtype, seed=self.seed + seed)
        return cache.to(DEVICE)

    def inputs(self) -> tuple[Tensor, ...]:
        """query, both caches, weights of keys and of values, start."""
        width = self.plain + self.rope
        query = normal(1, self.rows, self.heads, width, dtype=self.dtype, seed=self.seed)
        weight = normal(
            self.heads, self.plain + self.value_dim, self.rank,
            dtype=self.dtype, seed=self.seed + 1, scale=self.rank**-0.5,
        )  # fmt: skip
        return (
            in_nan(query).transpose(1, 2), self.cache(self.rank, 2), self.cache(self.rope, 3),
            weight[:, : self.plain], weight[:, self.plain :], torch.tensor([self.start], device=DEVICE),
        )  # fmt: skip

    def exact(self) -> Tensor:
        *tensors, start = self.inputs()
        return reference_latent_attention(*(t.double() for t in tensors), start, scale=self.scale)

    def run(self) -> Tensor:
        room = self.start + self.rows + self.spare
        return latent_attention(*self.inputs(), scale=self.scale, max_length=room)

    def check(self) -> Tensor:
        """Compare with float64 and return the result."""
        out = self.run()
        assert out.shape == (self.rows, self.heads, self.value_dim) and out.is_contiguous()
        assert not out.isnan().any()
        exact = self.exact()
        error = ((out.double() - exact).abs().max() / exact.abs().max().clamp(min=1)).item()
        assert error < 2 * torch.finfo(self.dtype).eps, f"{self}: off by {error}"
        return out


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


CASES = [
    Case(heads=1, rows=1, start=PART - 1),
    Case(heads=5, rows=4, start=PART - 2),  # tiles hold parts of tokens, rows end in different parts
    Case(heads=2, rows=2, start=40, spare=0, rank=512, rope=64, plain=128, value_dim=128),
    Case(heads=3, rank=80, rope=24, plain=40, value_dim=8),
    Case(heads=1, rows=1, start=17 * PART, spare=PART, rank=16),  # more parts than are merged at once
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ways_are_those_of_float64(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = replace(case, dtype=dtype).check()
    monkeypatch.setattr(module, "SPLIT_ROWS", 0)
    assert torch.equal(split, replace(case, dtype=dtype).check())


def sums_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the case's rows sum up of latent vectors, in 32 bits: rounding to 16 would hide another order."""
    product, found, within = head_linear, [], [False]

    def by_head(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None:
            found.append(x)
            return out
        within[0] = True
        made = product(x, weight)
        within[0] = False
        return made

    def wide(*shape: object, **options: object) -> Tensor:
        return poisoned_empty(*shape, **(options if within[0] else {**options, "dtype": torch.float32}))

    with monkeypatch.context() as patch:
        patch.setattr(module, "head_linear", by_head)
        patch.setattr(torch, "empty", wide)
        case.run()
    return torch.cat(found)


@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=str)
def test_both_ways_sum_in_the_same_order(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    split = sums_of(case, monkeypatch)
    monkeypatch.setattr(module, "SPLIT_ROWS", 0)
    loop = sums_of(case, monkeypatch)
    assert split.dtype is torch.float32 and not split.isnan().any() and torch.equal(split, loop)


def test_bits_depend_neither_on_blocks_nor_on_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 heads a token is a tile, which the interpreter, too, computes alike wherever it is."""
    case = Case(heads=16, rows=4, start=PART - 1, spare=PART, rank=32)
    whole = case.check()
    query, *others, start = case.inputs()
    for token in (0, 3):
        alone = latent_attention(
            query[:, :, token : token + 1], *others, start + token, scale=case.scale, max_length=2 * PART
        )
        assert torch.equal(alone[0], whole[token]), token
    monkeypatch.setattr(module, "MAX_BYTES", 2 * 4 * 16 * 32)  # two tokens a block, 16 partial rows
    assert torch.equal(case.run(), whole)
    monkeypatch.setattr(module, "SPLIT_ROWS", 0)
    assert torch.equal(case.run(), whole)


@settings(max_examples=4)
@example(2, 1, 391, 0, 1, 2, 7, 7, 580)  # a sum of 4.6
@given(
    heads=st.integers(1, 18), rows=st.integers(1, 3), start=st.integers(0, 600), spare=st.integers(0, 300),
    rank=st.integers(1, 70), rope=st.integers(1, 40), plain=st.integers(1, 40), value_dim=st.integers(1, 40),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_attention_of_any_shape(
    heads: int, rows: int, start: int, spare: int, rank: int, rope: int, plain: int, value_dim: int, seed: int
) -> None:
    Case(heads, rows, start, spare, rank, rope, plain, value_dim, seed).check()


def test_many_rows_take_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    for way in ("split", "loop"):
        whole = getattr(module._Launch, way)
        monkeypatch.setattr(
            module._Launch, way, lambda *args, way=way, whole=whole: (ways.append(way), whole(*args))
        )
    for rows in (80, 81):
        Case(heads=1, rows=rows, start=0, spare=0, rank=16).run()
    assert ways == ["split", "loop"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_accurate_as_expanding_the_cache(dtype: torch.dtype) -> None:
    """DeepSeek-V2-Lite's dimensions, fewer heads: root mean square errors against float64."""
    case = Case(2, 2, 120, 0, rank=512, rope=64, plain=128, value_dim=128, dtype=dtype)
    query, latent, rope, keys, values, start = case.inputs()
    exact = case.exact()
    made = [linear(latent[0, 0], w.flatten(0, 1)).unflatten(1, w.shape[:2]) for w in (keys, values)]
    key, value = (part.transpose(0, 1)[None] for part in made)
    key = torch.cat((key, rope.expand(-1, case.heads, -1, -1)), dim=-1)
    expanded = attention(query, key, value, start, scale=case.scale, max_length=latent.shape[2])
    errors = [(out.double() - exact).pow(2).mean().sqrt().item() for out in (case.run(), expanded)]
    assert 0 < errors[0] < 1.1 * errors[1], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 512, 128), (17, 40, 200), (40, 16, 16)])
def test_products_by_head(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x = in_nan(normal(rows, 3, depth, dtype=dtype))
    for weight in (
        normal(3, columns, depth, dtype=dtype, seed=1, scale=depth**-0.5),
        normal(3, depth, columns, dtype=dtype, seed=2, scale=depth**-0.5).mT,
    ):
        exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
        assert_rounded(head_linear(x, weight), exact, slack=1e-5)


@pytest.mark.parametrize(
    ("split_rows", "rows", "start", "counts"),
    [(80, 20, 0, (2, 6)), (0, 40, 0, (4, 0)), (80, 20, 700, (4, 10))],  # partial results of four parts
)
def test_no_launch_takes_more_room_than_it_may(
    split_rows: int, rows: int, start: int, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor] = []

    def noted(*shape: object, **options: object) -> Tensor:
        taken.append(poisoned_empty(*shape, **options))
        return taken[-1]

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(module, "MAX_BYTES", 30_000)
    monkeypatch.setattr(module, "SPLIT_ROWS", split_rows)
    Case(heads=4, rows=rows, start=start).check()
    latents = [made.nbytes for made in taken if made.dtype is not torch.float32 and made.shape[-1] == 64]
    partial = [made.nbytes for made in taken if made.dtype is torch.float32]
    assert (len(latents), len(partial)) == counts
    most = max(latents) * 2 + max(
        (a + b for a, b in zip(partial[::2], partial[1::2], strict=True)), default=0
    )
    assert 25_000 < most <= 30_000


def test_what_kernels_may_take_is_planned_for() -> None:
    assert max(module.MAX_BYTES, SECTION_PARTIAL_BYTES) <= _KERNEL_ATTENTION_BYTES
