"""Attention by the CPU lane against float64, and that a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import Case, cases, naive
from test_cpu_lane import rig
from torch import Tensor

from localmoe.core.errors import HardwareError
from localmoe.experts import cpu_lane, lane_attention
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.in_place import InPlaceMemory
from localmoe.experts.lane_attention import MOST_SHARING
from localmoe.kernels.attention import KV_BLOCK

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(scope="module")
def lane() -> Iterator[CpuLane]:
    with rig(compute=torch.float32, caller_works=True) as made:
        yield made.lane


def in_cache(tensor: Tensor, more: int = KV_BLOCK) -> Tensor:
    """As a cache hands it out: the first positions of each head's memory."""
    heads, length, width = tensor.shape
    memory = torch.full((heads, length + more, width), torch.nan)
    memory[:, :length] = tensor
    return memory[:, :length]


def attend(lane: CpuLane, case: Case, mask: Tensor, rows: slice = slice(None)) -> Tensor:
    q, k, v, sinks = case.tensors()
    scale = case.head_dim**-0.5
    return lane.attend(q[:, rows], in_cache(k), in_cache(v), mask[:, rows], scale, case.softcap, sinks)


def exact(case: Case, mask: Tensor) -> Tensor:
    q, k, v, sinks = case.tensors()
    return naive(q, k, v, mask, case.head_dim**-0.5, case.softcap, sinks)


@given(cases, st.sampled_from([0, 1 << 40]), st.sampled_from([1, 700, 1 << 24]))
@settings(max_examples=60)
def test_it_is_attention_and_a_row_is_the_same_alone(
    lane: CpuLane, case: Case, alone_bytes: int, most: int
) -> None:
    """By all threads or by the caller, in one job or sliced into several."""
    case = replace(case, dtype=torch.float32)
    mask = case.causal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_lane, "_ALONE_BYTES", alone_bytes)
        whole = attend(lane, case, mask)
        torch.testing.assert_close(whole.double(), exact(case, mask), **CLOSE)
        patch.setattr(lane_attention, "_MOST_NUMBERS", most)
        assert torch.equal(attend(lane, case, mask), whole)
        for row in range(case.rows):
            assert torch.equal(attend(lane, case, mask, slice(row, row + 1))[0], whole[row])


@pytest.mark.parametrize("width", [64, 128, 192])
def test_heads_as_wide_as_those_of_models(lane: CpuLane, width: int) -> None:
    case = Case(heads=8, kv_heads=2, rows=5, blocks=4, head_dim=width, value_dim=128, start=430, sinks=True)
    torch.testing.assert_close(
        attend(lane, case, case.causal()).double(), exact(case, case.causal()), **CLOSE
    )


@pytest.mark.parametrize("rows", [129, 300])
def test_a_prompt_of_more_rows_than_a_job_has(lane: CpuLane, rows: int) -> None:
    case = Case(heads=2, kv_heads=1, rows=rows, blocks=3, head_dim=8, value_dim=4, start=20)
    torch.testing.assert_close(
        attend(lane, case, case.causal()).double(), exact(case, case.causal()), **CLOSE
    )


def test_a_mask_a_head_and_a_window_are_obeyed(lane: CpuLane) -> None:
    case = Case(heads=6, kv_heads=2, rows=5, blocks=4, start=500)
    mask = torch.rand(6, 5, case.length, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[:, :, 7] = True
    torch.testing.assert_close(attend(lane, case, mask).double(), exact(case, mask), **CLOSE)
    window = case.causal() & (torch.arange(case.length) > case.start + torch.arange(5)[None, :, None] - 20)
    torch.testing.assert_close(attend(lane, case, window).double(), exact(case, window), **CLOSE)


@pytest.mark.parametrize("sinks", [False, True])
def test_what_a_row_may_not_see_changes_no_bit(lane: CpuLane, sinks: bool) -> None:
    whole = Case(blocks=5, start=100, sinks=sinks, heads=8, kv_heads=1, head_dim=64, value_dim=64)
    q, k, v, sink = whole.tensors()
    found = []
    for blocks in range(1, 6):
        case = replace(whole, blocks=blocks)
        keys, values = in_cache(k[:, : case.length]), in_cache(v[:, : case.length])
        found.append(lane.attend(q, keys, values, case.causal(), 0.125, None, sink))
        keys[:, case.start + case.rows :] = values[:, case.start + case.rows :] = 3e38
        found.append(lane.attend(q, keys, values, case.causal(), 0.125, None, sink))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_queries_may_lie_in_any_order(lane: CpuLane) -> None:
    case = Case(rows=4)
    q, k, v, _ = case.tensors()
    keys, values, mask = in_cache(k), in_cache(v), case.causal()
    wanted = lane.attend(q, keys, values, mask, 0.25)
    by_token = q.transpose(0, 1).contiguous().transpose(0, 1)
    by_column = torch.empty(q.shape[::-1]).permute(2, 1, 0).copy_(q)
    for other in (by_token, by_column):
        assert other.stride() != q.stride()
        assert torch.equal(lane.attend(other, keys, values, mask, 0.25), wanted)


def test_huge_scores_and_no_numbers(lane: CpuLane) -> None:
    case = Case()
    q, k, v, _ = case.tensors()
    got = lane.attend(q * 1e4, in_cache(k * 1e4), in_cache(v), case.causal(), 1.0)
    expected = naive(q * 1e4, k * 1e4, v, case.causal(), 1.0, None, None)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)
    keys = in_cache(k)
    keys[0, 3] = torch.nan  # of one of two KV heads
    got = lane.attend(q, keys, in_cache(v), case.causal(), 0.25)
    assert got[:, :2].isnan().all() and got[:, 2:].isfinite().all()


def test_what_the_lane_does_not_take_is_computed_all_the_same() -> None:
    """More heads a KV head than a job has rows, other numbers, keys that lie apart."""
    with rig(compute=torch.float32, caller_works=True) as made:
        memory = InPlaceMemory(made.store, made.lane)
        many = Case(heads=MOST_SHARING + 1, kv_heads=1, rows=2, blocks=1, start=60)
        for case in (many, Case(dtype=torch.bfloat16), Case()):
            q, k, v, _ = case.tensors()
            if case == Case():
                k = k.transpose(1, 2).contiguous().transpose(1, 2)
            found = memory.attend(q, k, v, case.causal(), 0.25)
            close = CLOSE if case.dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
            wanted = naive(q, k, v, case.causal(), 0.25, None, None)
            torch.testing.assert_close(found.double(), wanted, **close)


def test_a_closed_lane_says_so() -> None:
    with rig(compute=torch.float32, caller_works=True) as made:
        made.lane.close()
        with pytest.raises(HardwareError):
            attend(made.lane, Case(), Case().causal())
