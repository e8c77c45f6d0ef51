"""A kernel fetches exactly the words at an address, into exactly where they belong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dense_cases import DEVICE

from localmoe.kernels.gpu.fetch import fetch


@pytest.mark.parametrize(("begin", "count"), [(0, 1), (1, 255), (0, 256), (3, 257), (16, 700), (5, 0)])
def test_words_arrive_in_order_and_nothing_beside_them_changes(begin: int, count: int) -> None:
    source = torch.randint(-(2**63), 2**63 - 1, (1000,))
    source = source.pin_memory() if DEVICE.type == "cuda" else source
    out = torch.full((1000,), 7, dtype=torch.int64, device=DEVICE)
    fetch(source[begin:].data_ptr(), out[begin : begin + count])
    expected = torch.full_like(source, 7)
    expected[begin : begin + count] = source[begin : begin + count]
    assert torch.equal(out.cpu(), expected)
