"""The rule by which a device samples: transformers' cuts, noise that has the right distribution, and settings
that a kernel reads as they were written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from localmoe.core.config import SamplingConfig
from localmoe.kernels.choices import (
    NEVER,
    NO_CHOICE,
    SETTING_WORDS,
    reference_choices,
    reference_noise,
    reference_scores,
    write_settings,
)
from localmoe.speculative.sampling import TokenSampler

NOTHING_SEEN = torch.full((1000,), NEVER, dtype=torch.int32)


@given(
    st.lists(st.integers(-60, 60), min_size=2, max_size=30), st.floats(0.05, 5), st.integers(0, 25),
    st.floats(0.001, 1), st.floats(0, 1), st.floats(0.1, 3), st.lists(st.integers(0, 29), max_size=6),
)  # fmt: skip
@settings(max_examples=150)
def test_the_cuts_are_those_of_transformers(
    numbers: list[int], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float,
    text: list[int],
) -> None:  # fmt: skip
    # no two are equal: which of several equals survive a sorted cut is nobody's promise
    logits = torch.tensor([n / 4 + i / 1000 for i, n in enumerate(numbers)])
    text = [token % len(numbers) for token in text]
    seen = NOTHING_SEEN[: len(numbers)].clone()
    seen[text] = 3
    config = SamplingConfig(temperature, top_p, top_k, min_p, penalty, seed=0)
    p = TokenSampler(config).distribution(logits, text)
    scores = reference_scores(logits, seen, 3, config)
    on_the_edge = [
        abs(float(p.cumsum(0)[-1]) - 1) > 1e-3,
        bool(((scores.isfinite() != (p > 0)) & (p < 1e-6)).any()),  # underflow, or a mass that rounds
    ]
    q = scores.softmax(0)
    if torch.equal(scores.isfinite(), p > 0):
        assert torch.allclose(q, p, rtol=1e-4, atol=1e-7)
    else:
        off = (scores.isfinite() != (p > 0)).nonzero().flatten()
        whole = _uncut(logits, seen, config)
        better = [float(whole[whole > whole[i]].sum()) for i in off]
        near = [abs(b - top_p) < 1e-5 for b in better]
        near_min = [abs(float(whole[i]) - min_p * float(whole.max())) < 1e-6 for i in off]
        assert any(on_the_edge) or all(a or b for a, b in zip(near, near_min, strict=True))


def _uncut(logits: torch.Tensor, seen: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    """Probabilities before top-p and min-p."""
    alone = SamplingConfig(
        config.temperature, top_k=config.top_k, repetition_penalty=config.repetition_penalty
    )
    return reference_scores(logits, seen, 3, alone).double().softmax(0)


def test_only_tokens_up_to_the_position_are_penalised_and_greedily_too() -> None:
    logits, seen = torch.tensor([2.0, -1.0, 1.0]), torch.tensor([4, 5, NEVER], dtype=torch.int32)
    config = SamplingConfig(repetition_penalty=2.0)
    assert reference_scores(logits, seen, 3, config).tolist() == [2.0, -1.0, 1.0]
    assert reference_scores(logits, seen, 4, config).tolist() == [1.0, -1.0, 1.0]
    assert reference_scores(logits, seen, 5, config).tolist() == [1.0, -2.0, 1.0]


def test_choices_have_the_distribution_and_positions_and_seeds_are_independent() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    config = SamplingConfig(temperature=1.3)
    p = (logits.double() / 1.3).softmax(0)
    by_position = reference_choices(logits.expand(6000, 5), NOTHING_SEEN[:5], torch.arange(6000), config, 77)
    by_seed = torch.cat(
        [
            reference_choices(logits[None], NOTHING_SEEN[:5], torch.tensor([9]), config, seed)
            for seed in range(1 << 33, (1 << 33) + 4000)
        ]
    )
    for chosen in (by_position, by_seed):
        counts = torch.bincount(chosen, minlength=5)
        assert chi_square_p(counts, p) > 1e-3
    pairs = torch.bincount(by_position[:-1] * 5 + by_position[1:], minlength=25)
    assert chi_square_p(pairs, torch.outer(p, p).flatten()) > 1e-3


def chi_square_p(counts: torch.Tensor, p: torch.Tensor) -> float:
    return float(stats.chisquare(counts.double(), p / p.sum() * counts.sum()).pvalue)


def test_the_noise_is_gumbels_and_differs_between_positions_and_seeds() -> None:
    noise = [reference_noise(seed, at, 4000).double() for seed in (5, 1 << 40) for at in range(40)]
    assert all(row.isfinite().all() for row in noise)
    assert (
        stats.kstest([stats.kstest(row, stats.gumbel_r.cdf).pvalue for row in noise], "uniform").pvalue > 1e-3
    )
    alike = torch.corrcoef(torch.stack(noise)) - torch.eye(len(noise))
    assert float(alike.abs().max()) < 5 / math.sqrt(4000)


def test_the_noise_comes_from_philox() -> None:
    uniform = ((0x6627E8D5 >> 9) + 0.5) / 2**23  # its first word for counters and keys of zero (Random123)
    assert float(reference_noise(0, 0, 1)) == pytest.approx(-math.log(-math.log(uniform)), rel=1e-5)


def test_a_draft_of_the_same_noise_chooses_what_the_target_does_as_often_as_they_agree() -> None:
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(12, generator=generator)
    draft = target + 0.3 * torch.randn(12, generator=generator)
    p, q = target.softmax(0).double(), draft.softmax(0).double()
    config, positions = SamplingConfig(temperature=1.0), torch.arange(5000)
    chosen = [
        reference_choices(x.expand(5000, 12), NOTHING_SEEN[:12], positions, config, 3)
        for x in (target, draft)
    ]
    same = float((chosen[0] == chosen[1]).double().mean())
    # P(same) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), never below (1 - d) / (1 + d)
    predicted = sum(float(1 / torch.maximum(p / p[i], q / q[i]).sum()) for i in range(12))
    distance = float((p - q).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) <= predicted <= 1 - distance
    assert same == pytest.approx(predicted, abs=4 * math.sqrt(predicted * (1 - predicted) / 5000))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_choose_nothing(bad: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 2.0, 1.0]])
    config = SamplingConfig(temperature=0.5, top_k=1)
    chosen = reference_choices(logits, NOTHING_SEEN[:3], torch.arange(2), config, 1)
    assert chosen.tolist() == [NO_CHOICE, 1]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2, "top_k": 10**6, "top_p": 0.3, "min_p": 1, "repetition_penalty": 3}]
)
def test_settings_are_written_as_they_are(options: dict[str, Any]) -> None:
    host = np.zeros(SETTING_WORDS, dtype=np.int64)
    config = SamplingConfig(**options)
    write_settings(host, config, 2**63 - 1)
    assert host[:2].tolist() == [2**63 - 1, config.top_k]
    wanted = [config.temperature, config.top_p, config.min_p, config.repetition_penalty]
    assert host.view(np.float64)[2:].tolist() == wanted
