"""The sum of two tensors against PyTorch's own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dense_cases import DTYPES, normal

from localmoe.kernels.gpu.add import add


@pytest.mark.parametrize("shape", [(1, 16), (3, 1000), (1, 2, 2048), (0, 8)])
def test_sums_are_those_of_pytorch_bit_for_bit(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        a, b = normal(*shape, dtype=dtype, scale=100), normal(*shape, dtype=dtype, seed=1)
        kept = a.clone(), b.clone()
        total = add(a, b)
        assert torch.equal(total, a + b) and total.dtype == dtype
        assert torch.equal(add(a, b, scale=0.22), a + b * 0.22), "the product is rounded as well"
        assert torch.equal(a, kept[0]) and torch.equal(b, kept[1])


def test_what_does_not_fit_together_is_refused() -> None:
    x = normal(4, 8, dtype=DTYPES[0])
    for other in (x[:2], x.float(), x.t().contiguous().t()):
        with pytest.raises(AssertionError):
            add(x, other)
