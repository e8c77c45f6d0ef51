"""The router against its reference: logits rounded as a projection's, every way of scoring, ties by index."""

from __future__ import annotations

import pytest
import torch
from dense_cases import DEVICE, DTYPES, assert_rounded, in_nan, normal, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.kernels.dense import ScoreKind, reference_linear, reference_route
from localmoe.kernels.gpu.router import route

SCORES: list[ScoreKind] = ["softmax", "sigmoid", "softmax_after_topk"]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("rows", "hidden", "experts", "top_k"),
    [(1, 2048, 60, 4), (9, 300, 128, 8), (17, 64, 8, 2), (2, 96, 5, 5), (1, 16, 1, 1), (3, 520, 512, 16)],
)
def test_the_best_experts_are_chosen(
    rows: int, hidden: int, experts: int, top_k: int, score: ScoreKind, renormalise: bool
) -> None:
    dtype = DTYPES[0]
    x = in_nan(normal(rows, hidden, dtype=dtype))
    weight = in_nan(normal(experts, hidden, dtype=dtype, seed=1, scale=hidden**-0.5))
    bias = normal(experts, dtype=dtype, seed=2)
    weights, index, logits = route(x, weight, top_k, score=score, renormalise=renormalise, bias=bias)
    exact = reference_linear(x.double(), weight.double(), bias.double())
    assert logits.dtype == dtype
    assert_rounded(logits, exact, 1e-5)
    expected, expected_index = reference_route(logits, top_k, score=score, renormalise=renormalise)
    assert weights.dtype == torch.float32 and index.dtype == torch.int64
    torch.testing.assert_close(weights, expected.float(), rtol=1e-5, atol=1e-7)
    assert torch.equal(index, expected_index)


def test_logits_may_stay_wide_and_weights_be_narrow() -> None:
    x, weight = normal(4, 700, dtype=DTYPES[0]), normal(33, 700, dtype=DTYPES[0], seed=1, scale=0.03)
    weights, _, logits = route(
        x, weight, 6, score="softmax", renormalise=True, out_dtype=DTYPES[0], logits_dtype=torch.float32
    )
    assert_rounded(logits, x.double() @ weight.double().T, 1e-5)
    assert weights.dtype == DTYPES[0]


@pytest.mark.parametrize(("rows", "hidden", "experts"), [(1, 2048, 64), (20, 300, 33)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_32_bits_are_used_as_they_are(
    rows: int, hidden: int, experts: int, dtype: torch.dtype
) -> None:
    x = in_nan(normal(rows, hidden, dtype=dtype))
    weight = in_nan(normal(experts, hidden, dtype=torch.float32, seed=1, scale=hidden**-0.5))
    _, index, logits = route(x, weight, 6, score="softmax", renormalise=False, logits_dtype=torch.float32)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(logits, exact.float(), rtol=1e-5, atol=2e-6)
    assert not torch.allclose(logits.double(), x.double() @ weight.to(dtype).double().T, rtol=1e-5, atol=2e-6)
    assert torch.equal(index, reference_route(logits, 6, score="softmax", renormalise=False)[1])


def test_a_choice_bias_moves_the_choice_and_no_weight() -> None:
    x, weight = normal(6, 128, dtype=DTYPES[0]), normal(20, 128, dtype=DTYPES[0], seed=1, scale=0.1)
    choice_bias = normal(20, dtype=torch.float32, seed=2)
    weights, index, logits = route(x, weight, 4, score="sigmoid", renormalise=False, choice_bias=choice_bias)
    expected, expected_index = reference_route(
        logits, 4, score="sigmoid", renormalise=False, choice_bias=choice_bias
    )
    assert torch.equal(index, expected_index)
    assert not torch.equal(index, reference_route(logits, 4, score="sigmoid", renormalise=False)[1])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    larger, same, _ = route(
        x, weight, 4, score="sigmoid", renormalise=False, choice_bias=choice_bias, scale=2.5
    )
    assert torch.equal(larger, weights * 2.5) and torch.equal(same, index)


@pytest.mark.parametrize(("experts", "groups", "top_k"), [(512, (8, 4), 8), (64, (8, 1), 8), (8, (2, 1), 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_some_groups_of_experts_are_chosen_from(
    experts: int, groups: tuple[int, int], top_k: int, biased: bool
) -> None:
    x = in_nan(normal(9, 300, dtype=DTYPES[0]))
    weight = in_nan(normal(experts, 300, dtype=torch.float32, seed=1, scale=0.06))
    bias = normal(experts, dtype=torch.float32, seed=2) if biased else None
    weights, index, logits = route(
        x, weight, top_k, score="sigmoid", renormalise=True, choice_bias=bias, groups=groups,
        logits_dtype=torch.float32,
    )  # fmt: skip
    wanted = {"score": "sigmoid", "renormalise": True, "choice_bias": bias}
    expected, expected_index = reference_route(logits, top_k, groups=groups, **wanted)  # type: ignore[arg-type]
    assert torch.equal(index, expected_index)
    assert not torch.equal(index, reference_route(logits, top_k, **wanted)[1])  # type: ignore[arg-type]
    assert all(len({int(e) * groups[0] // experts for e in row}) <= groups[1] for row in index)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_an_experts_scale_is_of_its_weights_alone() -> None:
    x, weight = normal(6, 128, dtype=DTYPES[0]), normal(20, 128, dtype=DTYPES[0], seed=1, scale=0.1)
    weights, index, logits = route(x, weight, 4, score="softmax", renormalise=True)
    scale = normal(20, dtype=DTYPES[0], seed=2)
    scaled, same, unscaled = route(x, weight, 4, score="softmax", renormalise=True, expert_scale=scale)
    assert torch.equal(scaled, weights * scale.float()[index])
    assert torch.equal(same, index) and torch.equal(unscaled, logits)


@settings(max_examples=15)
@given(st.integers(2, 40), st.integers(0, 99), st.sampled_from(SCORES), st.data())
def test_equal_experts_are_chosen_in_order(
    experts: int, seed: int, score: ScoreKind, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, min(experts, 16)))
    levels = torch.randint(0, 3, (experts,), generator=torch.Generator().manual_seed(seed))
    weight = (levels[:, None] * torch.ones(16)).to(device=DEVICE, dtype=DTYPES[0])
    x = torch.full((2, 16), 0.25, dtype=DTYPES[0], device=DEVICE)
    _, index, logits = route(x, weight, top_k, score=score, renormalise=False)
    assert torch.equal(index, reference_route(logits, top_k, score=score, renormalise=False)[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_broken_activations_still_give_indices_of_experts() -> None:
    x = torch.full((3, 32), torch.nan, dtype=DTYPES[0], device=DEVICE)
    _, index, _ = route(x, normal(7, 32, dtype=DTYPES[0]), 4, score="softmax", renormalise=True)
    assert ((index >= 0) & (index < 7)).all()
