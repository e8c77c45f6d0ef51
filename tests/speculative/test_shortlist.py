"""What is left of the likeliest tokens is what transformers leaves of the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.speculative import sampling
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.shortlist import SHORTLISTS, cut_shortlist

VOCAB, LENGTH = 600, 48
NEAR = 1e-5  # of a sum of probabilities in 32 bits


def whole(logits: Tensor, config: SamplingConfig) -> Tensor:
    """By transformers, on all tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "SHORTLISTS", ())
        return TokenSampler(config).distribution(logits, [])


def border(logits: Tensor, config: SamplingConfig) -> float:
    """How near the nearest token is to where top-p or min-p cuts."""
    p = (logits.double() / config.temperature).softmax(0).sort(descending=True).values
    if 0 < config.top_k < len(p):
        p = p[: config.top_k] / p[: config.top_k].sum()
    by_p = (p.cumsum(0) - p - config.top_p).abs().min() if config.top_p < 1 else np.inf
    by_min = (p / p[0] - config.min_p).abs().min() if config.min_p else np.inf
    return float(min(by_p, by_min))


@given(
    st.integers(0, 10_000), st.floats(0.2, 3.0), st.floats(0.5, 6.0), st.integers(0, 60),
    st.sampled_from([1.0, 0.99, 0.95, 0.8, 0.3, 0.01]), st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]),
)  # fmt: skip
@settings(max_examples=200)
def test_the_same_tokens_with_the_same_chances_survive(
    seed: int, temperature: float, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    config = SamplingConfig(temperature, top_p, top_k, min_p)
    logits = spread * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    short = cut_shortlist(logits, LENGTH, config)
    expected = whole(logits, config)
    if short is None:
        assert top_k >= LENGTH or int((expected > 0).sum()) >= LENGTH or border(logits, config) < NEAR
    elif border(logits, config) > NEAR:
        assert torch.equal(short > 0, expected > 0)
        assert short.dtype == torch.float32 and torch.allclose(short, expected, rtol=1e-5, atol=1e-8)
        assert int((short > 0).sum()) < LENGTH


@given(
    st.integers(0, 10_000), st.sampled_from([1, 2, 7, LENGTH - 1, LENGTH, 300]), st.sampled_from([0, 3, 40]),
    st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.05]),
)  # fmt: skip
@settings(max_examples=100)
def test_of_few_that_a_grammar_allows_the_same_survive(
    seed: int, allowed: int, top_k: int, top_p: float, min_p: float
) -> None:
    config, chance = SamplingConfig(1.0, top_p, top_k, min_p), torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(VOCAB, generator=chance)
    logits[torch.randperm(VOCAB, generator=chance)[allowed:]] = -torch.inf
    short, expected = cut_shortlist(logits, LENGTH, config), whole(logits, config)
    assert short is not None or allowed >= LENGTH, "no other token can survive"
    if short is not None and border(logits, config) > NEAR:
        assert torch.equal(short > 0, expected > 0)
        assert torch.allclose(short, expected, rtol=1e-5, atol=1e-8)
        assert (logits[short > 0] > -torch.inf).all()


def test_equals_of_the_last_of_top_k_stay_and_those_beyond_the_shortlist_are_not_forgotten() -> None:
    config = SamplingConfig(1.0, top_k=3)
    logits = torch.full((VOCAB,), -5.0)
    logits[[7, 9, 11, 13, 17]] = torch.tensor([4.0, 3.0, 2.0, 2.0, 2.0])
    short = cut_shortlist(logits, LENGTH, config)
    assert short is not None and short.nonzero().flatten().tolist() == [7, 9, 11, 13, 17]
    assert torch.allclose(short, whole(logits, config))
    assert cut_shortlist(logits, 5, config) is None  # there may be a sixth
    assert cut_shortlist(torch.zeros(VOCAB), LENGTH, SamplingConfig(1.0, top_p=0.5)) is None
    assert cut_shortlist(logits, LENGTH, SamplingConfig(1.0, top_k=LENGTH)) is None


@pytest.mark.parametrize("spread", [4.0, 0.3, 0.0])
def test_a_sampler_of_a_large_vocabulary_gives_the_same_by_every_way(spread: float) -> None:
    """A peaked distribution takes the first shortlist, a flat one none."""
    config = SamplingConfig(0.6, top_p=0.95, repetition_penalty=1.05, seed=1)
    logits = spread * torch.randn(3 * SHORTLISTS[-1], generator=torch.Generator().manual_seed(0))
    history = list(range(40))
    sampler = TokenSampler(config)
    got = sampler.distribution(logits, history)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "SHORTLISTS", ())
        expected = TokenSampler(config).distribution(logits, history)
    differing = (got > 0) != (expected > 0)
    assert int(differing.sum()) <= 1 or spread == 0.0  # in 32 bits the sum of all is not exact
    assert torch.allclose(got, expected, atol=1e-5)
    assert got[sampler.draw(got)] > 0


def test_draws_from_a_large_vocabulary_are_what_they_should_be_and_repeat() -> None:
    config = SamplingConfig(1.0, top_k=2, seed=5)
    logits = torch.zeros(150_000)
    logits[[149_999, 3]] = torch.tensor([5.0, 4.0])
    first, second = TokenSampler(config), TokenSampler(config)
    drawn = [first.draw(first.distribution(logits, [])) for _ in range(700)]
    assert drawn == [second.draw(second.distribution(logits, [])) for _ in range(700)]
    share = drawn.count(149_999) / len(drawn)
    assert set(drawn) == {149_999, 3} and share == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.05)


def test_how_many_equals_lie_beyond_the_shortlist_counts_for_top_p_too() -> None:
    logits = torch.full((9000,), -50.0)
    logits[:40], logits[40:2040] = torch.linspace(8, 4, 40), 3.0
    config = SamplingConfig(temperature=1.0, top_k=50, top_p=0.9)
    for length in SHORTLISTS:
        short = cut_shortlist(logits, length, config)
        assert (short is None) == (length < 2040)
        if short is not None:  # which of those alike is left does not count
            found, expected = short.sort().values, whole(logits, config).sort().values
            assert torch.allclose(found, expected, rtol=1e-2, atol=1e-3 * float(expected[-1]))
            assert abs(int((found > 0).sum()) - int((expected > 0).sum())) <= 2
