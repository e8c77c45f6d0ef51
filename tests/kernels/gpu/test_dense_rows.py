"""Norms, rotary embedding and cache writes against transformers' own functions, on views with odd strides."""

from __future__ import annotations

import pytest
import torch
from dense_cases import DEVICE, DTYPES, assert_rounded, in_nan, normal, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from localmoe.kernels.dense import reference_apply_rope, reference_rms_norm, reference_write_kv
from localmoe.kernels.gpu.norm import rms_norm, row_strides
from localmoe.kernels.gpu.rope import apply_rope, rotate, write_kv

EPS = 1e-6


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("shape", [(1, 2048), (3, 100), (1, 5, 64), (2, 3, 4, 7), (9,)])
def test_a_norm_is_that_of_llama(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype, scale=3.0)
    x = in_nan(x) if len(shape) == 2 else x
    weight = normal(shape[-1], dtype=dtype, seed=1)
    with torch.device(DEVICE):
        llama = LlamaRMSNorm(shape[-1], EPS).to(dtype)
    llama.weight.data.copy_(weight)
    y = rms_norm(x, weight, EPS)
    wide = x.double()
    exact = weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    assert y.is_contiguous()
    assert_rounded(y, exact, 1e-6, ulps=1.6)  # two roundings
    with torch.no_grad():
        off = (y != llama(x)).float().mean()
    assert off <= (0.01 if dtype != torch.float32 else 1.0)  # a float32 sum in another order


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_norm_is_that_of_gemma(dtype: torch.dtype) -> None:
    x, weight = normal(5, 96, dtype=dtype), normal(96, dtype=dtype, seed=1)
    with torch.device(DEVICE):
        gemma = GemmaRMSNorm(96, EPS).to(dtype)
    gemma.weight.data.copy_(weight)
    exact = reference_rms_norm(x.double(), weight.double(), EPS, 1.0)
    assert_rounded(rms_norm(x, weight, EPS, weight_offset=1.0), exact, 1e-6)
    with torch.no_grad():
        assert_rounded(gemma(x), exact, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_may_have_no_weight_or_one_in_32_bits(dtype: torch.dtype) -> None:
    x = in_nan(normal(7, 96, dtype=dtype, scale=3.0))
    plain = rms_norm(x, None, EPS)
    assert torch.equal(plain, rms_norm(x, torch.ones(96, dtype=dtype, device=x.device), EPS))
    wide = x.double()
    assert_rounded(plain, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS), 1e-6)
    weight = normal(96, dtype=torch.float32, seed=1)
    scaled = rms_norm(x, weight, EPS)
    assert torch.equal(scaled, (plain.float() * weight).to(dtype))
    assert torch.equal(rms_norm(x, weight, EPS, factor=0.019), (scaled.float() * 0.019).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_rounded_before_the_norm(dtype: torch.dtype) -> None:
    x, residual = in_nan(normal(7, 80, dtype=dtype)), in_nan(normal(7, 80, dtype=dtype, seed=1, scale=9.0), 3)
    weight = normal(80, dtype=dtype, seed=2)
    y, total = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight, EPS))
    y, total = rms_norm(x, weight, EPS, residual, scale=0.22)
    assert torch.equal(total, x * 0.22 + residual), "the product is rounded as well"
    assert torch.equal(y, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6])
def test_heads_of_a_fused_projection_are_normed_in_place(rows: int, dtype: torch.dtype) -> None:
    fused = in_nan(normal(rows, 5 * 64 + 32, dtype=dtype))
    heads = fused[:, 32:].unflatten(-1, (5, 64))[None]
    weight = normal(64, dtype=dtype, seed=1)
    assert torch.equal(rms_norm(heads, weight, EPS), rms_norm(heads.contiguous(), weight, EPS))
    across = heads.transpose(1, 2)
    assert torch.equal(rms_norm(across, weight, EPS), rms_norm(across.contiguous(), weight, EPS))


def test_row_strides_find_every_row() -> None:
    base = torch.arange(4 * 6 * 8 * 5).view(4, 6, 8, 5)
    for x in (
        base,
        base[:1],
        base[:, :1].transpose(1, 2),
        base[0, :, 2],
        base[0].transpose(0, 1),
        base[1, 2, 3],
    ):
        inner, outer_stride, inner_stride, column = row_strides(x)
        rows = x.numel() // 5
        first = [r // inner * outer_stride + r % inner * inner_stride for r in range(rows)]
        assert first == [int(v) for v in (x.reshape(rows, 5)[:, 0] - x.flatten()[0])]
        assert column == 1
    with pytest.raises(AssertionError, match="third stride"):
        row_strides(base[:, :5, :7])


@settings(max_examples=15)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_rotation_is_that_of_llama_bit_for_bit(
    rows: int, heads: int, kv_heads: int, half: int, rest: int, seed: int
) -> None:
    dtype, dim = DTYPES[0], 2 * half + rest
    q = in_nan(normal(1, rows, heads, dim, dtype=dtype, seed=seed)).transpose(1, 2)
    k = in_nan(normal(1, rows, kv_heads, dim, dtype=dtype, seed=seed + 1)).transpose(1, 2)
    cos = in_nan(
        normal(1, rows, 2 * half, dtype=dtype, seed=seed + 2)
    )  # halves that differ, which rope allows
    sin = in_nan(normal(1, rows, 2 * half, dtype=dtype, seed=seed + 3))
    q_out, k_out = apply_rope(q, k, cos, sin)
    expected = reference_apply_rope(q, k, cos, sin)
    assert torch.equal(q_out, expected[0]) and torch.equal(k_out, expected[1])
    for alone, together in ((rotate(q, cos, sin), q_out), (rotate(k, cos, sin), k_out)):
        assert alone.is_contiguous() and torch.equal(alone, together)
    llama = apply_rotary_pos_emb(q[..., : 2 * half], k[..., : 2 * half], cos, sin)
    assert torch.equal(q_out[..., : 2 * half], llama[0]) and torch.equal(k_out[..., : 2 * half], llama[1])


@settings(max_examples=8)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40), st.integers(0, 9), st.integers(0, 99))
def test_neighbours_are_turned_bit_for_bit(rows: int, heads: int, half: int, rest: int, seed: int) -> None:
    """As DeepSeek-V3's code does it, which puts them in halves, and as DeepSeek-V2's, by complex numbers."""
    dtype, dim = DTYPES[0], 2 * half + rest
    q = in_nan(normal(1, rows, heads, dim, dtype=dtype, seed=seed)).transpose(1, 2)
    k = in_nan(normal(1, rows, 1, dim, dtype=dtype, seed=seed + 1)).transpose(1, 2)
    cos, sin = (in_nan(normal(1, rows, half, dtype=dtype, seed=seed + i)).repeat(1, 1, 2) for i in (2, 3))
    got = apply_rope(q, k, cos, sin, "pairs to halves")
    expected = reference_apply_rope(q, k, cos, sin, "pairs to halves")
    theirs = apply_rotary_pos_emb_interleave(q[..., : 2 * half], k[..., : 2 * half], cos, sin)
    for mine, reference, other in zip(got, expected, theirs, strict=True):
        assert torch.equal(mine, reference) and torch.equal(mine[..., : 2 * half], other)
    wide = [part[..., :half].float() for part in (cos, sin)]
    got = apply_rope(q, k, *wide, "pairs")
    exact = reference_apply_rope(q.double(), k.double(), cos.double(), sin.double(), "pairs")
    theirs = apply_rotary_emb(q[..., : 2 * half], k[..., : 2 * half], torch.complex(*wide))
    for mine, reference, other in zip(got, exact, theirs, strict=True):
        assert torch.allclose(mine.double(), reference, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.allclose(mine[..., : 2 * half].double(), other.double(), rtol=2**-7, atol=1e-6)
    assert torch.equal(rotate(q, cos, sin, "pairs"), reference_apply_rope(q, k, cos, sin, "pairs")[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (3, 4), (9, 4), (12, 2), (5, 7)])
def test_rows_go_to_their_positions_and_nowhere_else(start: int, rows: int, dtype: torch.dtype) -> None:
    key = in_nan(normal(1, rows, 3, 24, dtype=dtype)).transpose(1, 2)
    value = in_nan(normal(1, rows, 3, 16, dtype=dtype, seed=1)).transpose(1, 2)
    caches = [torch.full((1, 3, 12, d), torch.nan, dtype=dtype, device=DEVICE) for d in (24, 16)]
    expected = [cache.clone() for cache in caches]
    at = torch.tensor([start], device=DEVICE)
    write_kv(key, value, caches[0], caches[1], at)
    reference_write_kv(key, value, expected[0], expected[1], at)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache.nan_to_num(777.0), wanted.nan_to_num(777.0))
