"""The exactness rule, on hardware: a row's bits are the same whatever rows ride along, wherever it lies, and
however long the launch was sized."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from dense_cases import DEVICE, normal
from torch import Tensor

from localmoe.kernels.gpu import attention as attention_module
from localmoe.kernels.gpu import latent_attention as latent_module
from localmoe.kernels.gpu.attention import attention
from localmoe.kernels.gpu.head_linear import head_linear
from localmoe.kernels.gpu.latent_attention import latent_attention
from localmoe.kernels.gpu.linear import linear, linear_gated
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.router import route

pytestmark = pytest.mark.gpu
MOST = 1024
COUNTS = (1, 2, 9, 16, 17, 33, 80, 129, MOST)
DTYPES = [torch.bfloat16, torch.float16]


def row_slices(rows: int) -> list[slice]:
    """`rows` rows from the beginning, the middle and the end."""
    return [
        slice(at, at + rows)
        for at in {0, (MOST - rows) // 2 // 3 * 3 + rows % 2, MOST - rows}
        if at + rows <= MOST
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "depth"),
    [(6144, 2048), (2048, 5632), (60, 2048), (1, 2048), (40_000, 1024), (2048, 200), (300, 2880)],
)
def test_products(columns: int, depth: int, dtype: torch.dtype) -> None:
    x = normal(MOST, depth, dtype=dtype)
    weight = normal(columns, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    bias, residual = normal(columns, dtype=dtype, seed=2), normal(MOST, columns, dtype=dtype, seed=3)
    whole = linear(x, weight, bias, residual=residual)
    wide = linear(x, weight, out_dtype=torch.float32)
    gated = linear_gated(x, weight) if columns > 1 else None
    for rows in COUNTS:
        for at in row_slices(rows):
            assert torch.equal(linear(x[at], weight, bias, residual=residual[at]), whole[at]), (rows, at)
            assert torch.equal(linear(x[at], weight, out_dtype=torch.float32), wide[at]), (rows, at)
            assert gated is None or torch.equal(linear_gated(x[at], weight), gated[at]), (rows, at)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 2048, 2880])
def test_norms(length: int, dtype: torch.dtype) -> None:
    x, residual = normal(MOST, length, dtype=dtype), normal(MOST, length, dtype=dtype, seed=1)
    weight = normal(length, dtype=dtype, seed=2)
    whole = rms_norm(x, weight, 1e-6, residual)[0]
    for rows in COUNTS:
        for at in row_slices(rows):
            assert torch.equal(rms_norm(x[at], weight, 1e-6, residual[at])[0], whole[at]), (rows, at)
            assert torch.equal(rms_norm(x[None, at], weight, 1e-6, residual[None, at])[0][0], whole[at])


@pytest.mark.parametrize(
    ("hidden", "experts", "top_k"), [(2048, 60, 4), (2048, 128, 8), (2880, 32, 4), (700, 7, 2)]
)
def test_routes(hidden: int, experts: int, top_k: int) -> None:
    x = normal(MOST, hidden, dtype=torch.bfloat16)
    weight = normal(experts, hidden, dtype=torch.bfloat16, seed=1, scale=hidden**-0.5)
    whole = route(x, weight, top_k, score="softmax", renormalise=True, logits_dtype=torch.float32)
    for rows in COUNTS:
        for at in row_slices(rows):
            part = route(x[at], weight, top_k, score="softmax", renormalise=True, logits_dtype=torch.float32)
            assert all(torch.equal(a, b[at]) for a, b in zip(part, whole, strict=True)), (rows, at)


@dataclass(frozen=True)
class Heads:
    """One kind of attention layer."""

    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    value_dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, start: int, length: int
    ) -> Tensor:
        return attention(
            query, key, value, torch.tensor([start], device=DEVICE), scale=self.dim**-0.5, max_length=length,
            window=self.window, softcap=self.softcap, sinks=sinks if self.sinks else None,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        Heads(),
        Heads(heads=16, kv_heads=16),
        Heads(dim=64, value_dim=64, window=128, sinks=True),
        Heads(dim=80, value_dim=80, softcap=20.0),
        Heads(heads=4, kv_heads=4, dim=192),
        Heads(heads=4, dim=256, value_dim=256, window=300),
        Heads(heads=8, dim=512, value_dim=512),
    ],
    ids=str,
)
def test_attention(kind: Heads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over a prompt (the loop) against passes of any length at any place (the split)."""
    first, room = 700, 2048
    query = normal(1, kind.heads, MOST, kind.dim, dtype=dtype)
    key = normal(1, kind.kv_heads, room, kind.dim, dtype=dtype, seed=1)
    value = normal(1, kind.kv_heads, room, kind.value_dim, dtype=dtype, seed=2)
    sinks = normal(kind.heads, dtype=dtype, seed=3)
    whole = kind.attend(query, key, value, sinks, first, room)
    for rows in COUNTS:
        for at in row_slices(rows):
            live = first + at.stop
            arguments = (query[:, :, at], key, value, sinks, first + at.start)
            assert torch.equal(kind.attend(*arguments, live), whole[at]), (rows, at)
            assert torch.equal(kind.attend(*arguments, room), whole[at]), (rows, at)
    for bytes_of in ("CHUNK_PARTIAL_BYTES", "SECTION_PARTIAL_BYTES"):  # sections, and the loop for few rows
        monkeypatch.setattr(attention_module, bytes_of, 0)
        for rows in (1, 9, 80):
            for at in row_slices(rows):
                again = kind.attend(query[:, :, at], key, value, sinks, first + at.start, room)
                assert torch.equal(again, whole[at]), (bytes_of, rows, at)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(128, 512), (512, 128), (40, 80)])
def test_products_by_head(depth: int, columns: int, dtype: torch.dtype) -> None:
    x = normal(MOST, 3, depth, dtype=dtype)
    for weight in (
        normal(3, columns, depth, dtype=dtype, seed=1),
        normal(3, depth, columns, dtype=dtype, seed=2).mT,
    ):
        whole = head_linear(x, weight)
        for rows in COUNTS:
            for at in row_slices(rows):
                assert torch.equal(head_linear(x[at], weight), whole[at]), (rows, at)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 512, 64), (20, 512, 64), (3, 320, 24), (4, 64, 16)])
def test_attention_over_latent_vectors(
    heads: int, rank: int, rope: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over a prompt (the loop) against passes of any length at any place (the split)."""
    first, room, plain = 700, 2048, 128
    query = normal(1, heads, MOST, plain + rope, dtype=dtype)
    latent, turned = (normal(1, 1, room, dim, dtype=dtype, seed=dim) for dim in (rank, rope))
    weight = normal(heads, plain + 128, rank, dtype=dtype, seed=2, scale=rank**-0.5)

    def attend(at: slice, length: int) -> Tensor:
        start = torch.tensor([first + at.start], device=DEVICE)
        return latent_attention(
            query[:, :, at], latent, turned, weight[:, :plain], weight[:, plain:], start,
            scale=0.07, max_length=length,
        )  # fmt: skip

    whole = attend(slice(0, MOST), room)
    for rows in COUNTS:
        for at in row_slices(rows):
            assert torch.equal(attend(at, first + at.stop), whole[at]), (rows, at)
            assert torch.equal(attend(at, room), whole[at]), (rows, at)
    monkeypatch.setattr(latent_module, "MAX_BYTES", 64 * heads * rank)  # 16 tokens a block
    for split_rows in (0, 80):  # the loop for few rows; 16 rows of partial results at a time
        monkeypatch.setattr(latent_module, "SPLIT_ROWS", split_rows)
        for rows in (1, 9, 80):
            for at in row_slices(rows):
                assert torch.equal(attend(at, room), whole[at]), (split_rows, rows, at)


def test_a_captured_step_follows_the_live_length() -> None:
    """One graph, replayed as the cache grows, gives the bits of a fresh launch."""
    query = normal(1, 16, 1, 128, dtype=torch.bfloat16)
    key, value = (normal(1, 16, 1024, 128, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    start = torch.tensor([0], device=DEVICE)

    def step() -> Tensor:
        return attention(query, key, value, start, scale=0.1, max_length=1024)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for position in (0, 127, 128, 500, 1023):
        start.fill_(position)
        graph.replay()
        fresh = attention(
            query, key, value, torch.tensor([position], device=DEVICE), scale=0.1, max_length=position + 1
        )
        assert torch.equal(out, fresh), position
