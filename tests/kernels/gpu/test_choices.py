"""The kernels that choose tokens do what the reference does, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE

from localmoe.core.config import SamplingConfig
from localmoe.kernels.choices import (
    NEVER,
    NO_CHOICE,
    SETTING_WORDS,
    ChoiceView,
    reference_choices,
    reference_noise,
    reference_scores,
    write_settings,
)
from localmoe.kernels.gpu.choices import choose_tokens

SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 8.0, "top_k": 8, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 5.0, "top_p": 0.01},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.2, "min_p": 1.0},
    {"temperature": 3.0, "top_k": 300, "top_p": 0.5, "min_p": 0.05, "repetition_penalty": 0.7},
]


def settings_on_device(config: SamplingConfig, seed: int) -> Tensor:
    words = torch.zeros(SETTING_WORDS, dtype=torch.int64)
    write_settings(words.numpy(), config, seed)
    return words.to(DEVICE)


def chosen(logits: Tensor, seen: Tensor, positions: Tensor, config: SamplingConfig, seed: int) -> Tensor:
    return chosen_surely(logits, seen, positions, config, seed)[0]


def chosen_surely(
    logits: Tensor, seen: Tensor, positions: Tensor, config: SamplingConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """And their margins."""
    view = ChoiceView(settings_on_device(config, seed), seen.to(DEVICE))
    tokens, margins = choose_tokens(logits.to(DEVICE), positions.to(DEVICE), view)
    return tokens.cpu(), margins.cpu()


def check(logits: Tensor, seen: Tensor, positions: Tensor, config: SamplingConfig, seed: int) -> None:
    """Each choice is the reference's, or as good within rounding."""
    got = chosen(logits, seen, positions, config, seed)
    wanted = reference_choices(logits, seen, positions, config, seed)
    for row, (a, b) in enumerate(zip(got.tolist(), wanted.tolist(), strict=True)):
        if a != b:
            position = int(positions[row])
            scores = reference_scores(logits[row], seen, position, config)
            noise = 0 if config.greedy else reference_noise(seed, position, logits.shape[1])
            keys = scores + noise
            assert float(keys[b] - keys[a]) < 1e-4, (row, a, b)


def random_case(rows: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    seen = torch.full((vocab,), NEVER, dtype=torch.int32)
    written = torch.randint(vocab, (vocab // 3,), generator=generator)
    seen[written] = torch.randint(0, 12, (len(written),), generator=generator).int()
    return logits, seen, torch.arange(rows) + 4


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(2, 9000), (3, 37)])
def test_choices_are_those_of_the_reference(options: dict[str, Any], rows: int, vocab: int) -> None:
    logits, seen, positions = random_case(rows, vocab, seed=vocab)
    check(logits, seen, positions, SamplingConfig(**options), 2**62 + 5)


@settings(max_examples=25)
@given(
    st.integers(1, 70), st.integers(0, 99), st.floats(0.05, 9), st.floats(0.01, 1), st.integers(0, 30),
    st.floats(0, 1), st.floats(0.3, 3), st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_any_settings_choose_what_the_reference_does(
    vocab: int, case: int, temperature: float, top_p: float, top_k: int, min_p: float, penalty: float,
    seed: int,
) -> None:  # fmt: skip
    logits, seen, positions = random_case(2, vocab, case)
    check(logits, seen, positions, SamplingConfig(temperature, top_p, top_k, min_p, penalty), seed)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(4, 3000), (3, 37)])
def test_margins_are_what_the_choice_is_ahead_of_the_next_one(
    options: dict[str, Any], rows: int, vocab: int
) -> None:
    """Exactly where nothing is cut off; else what is cut off may be taken for the next one."""
    logits, seen, positions = random_case(rows, vocab, seed=vocab + 1)
    config, seed = SamplingConfig(**options), 2**61 + 3
    _, margins = chosen_surely(logits, seen, positions, config, seed)
    whole = config.top_p == 1 and config.min_p == 0 and not 0 < config.top_k < vocab
    for row, position in enumerate(positions.tolist()):
        keys = reference_scores(logits[row], seen, position, config)
        if not config.greedy:
            keys = keys + reference_noise(seed, position, vocab)
        first, second = keys.topk(2).values.tolist()
        assert -1e-5 <= float(margins[row]) <= max(first - second, 0) + 1e-4 or second == -torch.inf
        if whole:
            assert float(margins[row]) == pytest.approx(first - second, abs=1e-4)


def test_a_choice_without_any_other_is_very_sure() -> None:
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 7] = 1.0
    seen = torch.full((40,), NEVER, dtype=torch.int32)
    for config in (SamplingConfig(), SamplingConfig(temperature=1.0, top_k=1)):
        token, margin = chosen_surely(logits, seen, torch.tensor([3]), config, 1)
        assert int(token) == 7 and float(margin) > 1e6


@pytest.mark.parametrize("top_p", [0.3, 1.0])
@pytest.mark.parametrize("top_k", [0, 3, 7])
def test_equal_scores_stay_or_go_together(top_k: int, top_p: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 0.0, -5.0, -torch.inf]]).expand(30, 8).contiguous()
    seen, positions = torch.full((8,), NEVER, dtype=torch.int32), torch.arange(30)
    config = SamplingConfig(temperature=4.0, top_k=top_k, top_p=top_p)
    got = chosen(logits, seen, positions, config, 1)
    assert torch.equal(got, reference_choices(logits, seen, positions, config, 1))
    kept = {(0, 1.0): 7, (3, 1.0): 5, (7, 1.0): 7, (0, 0.3): 5, (3, 0.3): 5, (7, 0.3): 5}[top_k, top_p]
    assert set(got.tolist()) <= set(range(kept)) and len(set(got.tolist())) >= kept - 1


@pytest.mark.parametrize("equals", [3, 40, 600, 4000])
def test_all_that_equal_the_last_of_the_k_best_stay_however_many_there_are(equals: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.rand(1, 5000, generator=generator)
    best = torch.randperm(5000, generator=generator)[:equals]
    logits[0, best] = 2.0
    seen = torch.full((5000,), NEVER, dtype=torch.int32)
    got = []
    for at in range(6):
        config = SamplingConfig(temperature=1.0, top_k=2)
        check(logits, seen, torch.tensor([at]), config, 1)
        got.append(int(chosen(logits, seen, torch.tensor([at]), config, 1)))
    assert set(got) <= set(best.tolist()) and len(set(got)) > 2 - (equals == 3)


def test_a_row_depends_on_no_other_and_not_on_how_many_there_are() -> None:
    logits, seen, positions = random_case(6, 3000, seed=8)
    config = SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    together = chosen(logits, seen, positions, config, 6)
    for row in range(6):
        alone = chosen(logits[row : row + 1], seen, positions[row : row + 1], config, 6)
        assert alone.tolist() == [together[row]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_read_as_they_are(dtype: torch.dtype) -> None:
    logits, seen, positions = random_case(2, 700, seed=2)
    check(logits.to(dtype), seen, positions, SamplingConfig(temperature=0.8, top_p=0.9), 4)


@pytest.mark.parametrize("options", [{"temperature": 1.0, "top_k": 3, "top_p": 0.5}, {"temperature": 0.7}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_choose_nothing_and_end(bad: float, options: dict[str, Any]) -> None:
    logits, seen, positions = random_case(2, 5000, seed=3)
    logits[0, 4321] = bad
    if bad < 0:
        logits[0] = bad
    got = chosen(logits, seen, positions, SamplingConfig(**options), 4)
    assert got[0] == NO_CHOICE and 0 <= got[1] < 5000


def test_fewer_possible_tokens_than_k_are_all_possible() -> None:
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [3, 50]] = 1.0
    seen = torch.full((100,), NEVER, dtype=torch.int32)
    config = SamplingConfig(temperature=1.0, top_k=10, top_p=0.99)
    got = {int(chosen(logits, seen, torch.tensor([at]), config, 1)) for at in range(12)}
    assert got == {3, 50}
