"""Blocked attention against a plain float64 formula, and that a row's bits depend on that row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import Case, cases, naive
from torch import Tensor

from localmoe.kernels.attention import KV_BLOCK, blocked_attention
from localmoe.kernels.rows import CANDIDATES, measure_row_multiple


def run(case: Case, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, k, v, sinks = case.tensors()
    mask = case.causal() if mask is None else mask
    scale = case.head_dim**-0.5
    got = blocked_attention(q, k, v, mask, scale, softcap=case.softcap, sinks=sinks)
    return got, naive(q, k, v, mask, scale, case.softcap, sinks)


@given(cases)
@settings(max_examples=60)
def test_it_is_attention_for_any_grouping_cap_sink_and_width(case: Case) -> None:
    got, expected = run(case)
    assert got.dtype == case.dtype
    assert got.shape == (case.rows, case.heads, case.value_dim)
    tolerance = 2e-5 if case.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_mask_a_head_is_obeyed_head_by_head() -> None:
    case = Case(heads=6, kv_heads=2, rows=5)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 5, case.length, generator=generator) < 0.3
    mask[:, :, 7] = True  # each row sees at least one position
    got, expected = run(case, mask)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    shared, _ = run(case, mask[:1])
    assert not torch.equal(got[:, 1:], shared[:, 1:])


def test_a_window_that_skips_the_first_blocks_is_obeyed() -> None:
    case = Case(rows=4, blocks=4, start=500)
    position = case.start + torch.arange(4)[None, :, None]
    mask = case.causal() & (torch.arange(case.length) > position - 20)
    got, expected = run(case, mask)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("rows", [128, 129, 300])
def test_a_long_prompt_in_slices_is_attention_too(rows: int) -> None:
    case = Case(heads=2, kv_heads=1, rows=rows, blocks=3, head_dim=8, value_dim=4, start=20)
    got, expected = run(case)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def test_huge_scores_neither_overflow_nor_vanish() -> None:
    case = Case(sinks=True)
    q, k, v, sinks = case.tensors()
    q, k = q * 1e4, k * 1e4
    got = blocked_attention(q, k, v, case.causal(), 1.0, sinks=sinks)
    expected = naive(q, k, v, case.causal(), 1.0, None, sinks)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_sink_far_above_every_score_takes_all_the_weight() -> None:
    case = Case()
    q, k, v, _ = case.tensors()
    got = blocked_attention(q, k, v, case.causal(), 1.0, sinks=torch.full((4,), 500.0))
    assert torch.equal(got, torch.zeros_like(got))


def test_a_cache_that_is_no_whole_block_is_a_programming_error() -> None:
    q, k, v, _ = Case().tensors()
    with pytest.raises(AssertionError):
        blocked_attention(q, k[:, :-1], v[:, :-1], Case().causal()[..., :-1], 1.0)


garbage_kinds = st.sampled_from(["large", "tiny", "negative", "alternating"])


@given(cases, garbage_kinds)
@settings(max_examples=40)
def test_stale_garbage_past_the_live_length_changes_no_bit(case: Case, kind: str) -> None:
    q, k, v, sinks = case.tensors()
    live = case.start + case.rows
    top = torch.finfo(case.dtype).max
    values = {"large": (top, top), "tiny": (1e-7, 1e-7), "negative": (-top, -top), "alternating": (top, -top)}
    clean = [x.clone() for x in (k, v)]
    for x in clean:
        x[:, live:] = 0
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[:, live::2], x[:, live + 1 :: 2] = values[kind]
    mask, scale = case.causal(), case.head_dim**-0.5
    a, b = (
        blocked_attention(q, *kv, mask, scale, softcap=case.softcap, sinks=sinks) for kv in (clean, dirty)
    )
    assert torch.isfinite(a).all()
    assert torch.equal(a, b)


@pytest.mark.parametrize("sinks", [False, True])
def test_blocks_that_a_row_may_not_see_change_no_bit(sinks: bool) -> None:
    whole = Case(blocks=5, start=100, sinks=sinks, heads=8, kv_heads=1, head_dim=64, value_dim=64)
    q, k, v, sink = whole.tensors()
    results = []
    for blocks in range(1, 6):
        case = replace(whole, blocks=blocks)
        live = slice(0, case.length)
        results.append(blocked_attention(q, k[:, live], v[:, live], case.causal(), 0.125, sinks=sink))
    assert all(torch.equal(results[0], other) for other in results[1:])


def multiple_for(case: Case) -> int:
    """The padding that the machine needs for attention's two products, measured as the engine measures it."""
    scores = torch.randn(KV_BLOCK, case.head_dim, generator=torch.Generator().manual_seed(1))
    values = torch.randn(case.value_dim, KV_BLOCK, generator=torch.Generator().manual_seed(2))
    found = measure_row_multiple([scores, values], 4 * CANDIDATES[-1], transposed=False)
    assert found is not None
    return found


def padded(case: Case, first: int, count: int, multiple: int) -> Tensor:
    """The result of rows first .. first + count of the case, asked alone and padded with repetitions."""
    q, k, v, sinks = case.tensors()
    rows = [first + min(i, count - 1) for i in range(-(-count // multiple) * multiple)]
    out = blocked_attention(q[:, rows], k, v, case.causal()[:, rows], case.head_dim**-0.5, sinks=sinks)
    return out[:count]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (7, 7)])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_rows_bits_are_the_same_in_every_window_when_padded_to_the_measured_multiple(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    case = Case(
        heads, kv_heads, rows=17, blocks=2, head_dim=head_dim, value_dim=head_dim, start=120, sinks=True
    )
    multiple = multiple_for(case)
    whole = padded(case, 0, 17, multiple)
    alone = torch.cat([padded(case, t, 1, multiple) for t in range(17)])
    assert torch.equal(alone, whole)
    for window in (2, 5, 9):
        parts = [padded(case, t, min(window, 17 - t), multiple) for t in range(0, 17, window)]
        assert torch.equal(torch.cat(parts), whole)
