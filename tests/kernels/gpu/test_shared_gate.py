"""The gated shared expert against the same sum by PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE, DTYPES, normal, poisoned_empty, ulp

from localmoe.kernels.gpu.shared_gate import add_gated


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(like: Tensor) -> Tensor:
        return poisoned_empty(like.shape, dtype=like.dtype, device=like.device)

    monkeypatch.setattr(torch, "empty_like", poisoned)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 16), (3, 100), (9, 2048)])
def test_the_shared_experts_part_is_gated_and_added(rows: int, hidden: int) -> None:
    for dtype in DTYPES:
        x, routed = normal(rows, hidden, dtype=dtype), normal(rows, hidden, dtype=dtype, seed=1)
        shared = normal(rows, hidden, dtype=dtype, seed=2, scale=3)
        weight = normal(1, hidden, dtype=dtype, seed=3, scale=hidden**-0.5)
        kept = [tensor.clone() for tensor in (routed, shared, x, weight)]
        out = add_gated(routed, shared, x, weight)
        gate = torch.sigmoid((x.double() @ weight.double().T).to(dtype)).double()
        exact = routed.double() + gate * shared.double()
        assert out.dtype == dtype and out.shape == x.shape
        # the gate, the product and the sum are rounded, each to half a unit
        size = ulp(exact, dtype) + 3 * ulp(shared.double(), dtype)
        assert ((out.double() - exact).abs() <= size).all()
        for now, then in zip((routed, shared, x, weight), kept, strict=True):
            assert torch.equal(now, then)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, routed, shared = (normal(6, 72, dtype=DTYPES[0], seed=seed) for seed in range(3))
    weight = normal(1, 72, dtype=DTYPES[0], seed=3)
    whole = add_gated(routed, shared, x, weight)
    assert torch.equal(add_gated(routed[4:5], shared[4:5], x[4:5], weight), whole[4:5])
    assert whole.unique(dim=0).shape[0] == 6


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_a_gate_may_be_shut_or_wide_open(gate: float) -> None:
    x = torch.ones(2, 16, dtype=DTYPES[0], device=DEVICE)
    weight = torch.full((1, 16), gate / 16, dtype=DTYPES[0], device=DEVICE)
    out = add_gated(x * 2, x * 5, x, weight)
    assert (out == (7 if gate > 0 else 2)).all()


def test_tensors_with_other_strides_are_refused() -> None:
    x = normal(4, 32, dtype=DTYPES[0])
    with pytest.raises(AssertionError):
        add_gated(x, x, x.T.contiguous().T, x[:1])
    with pytest.raises(AssertionError):
        add_gated(x, x, x, x[:2])
