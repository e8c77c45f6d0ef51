"""From logits to a token: transformers' semantics for every setting, and seeds that repeat."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import CheckpointError, ConfigError
from localmoe.kernels.choices import NO_CHOICE
from localmoe.speculative.sampling import TokenSampler

VOCAB = 48
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.4, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "repetition_penalty": 0.5},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=1.0, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def generate(model: LlamaForCausalLM, prompt: list[int], options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=6,
        return_dict_in_generate=True, output_scores=True, output_logits=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_the_distribution_is_the_one_that_generate_samples_from(
    model: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    prompt = [5, 9, 9, 31, 2]
    out = generate(model, prompt, {"do_sample": True, "top_k": 0, **options})
    sampler = TokenSampler(SamplingConfig(**options))
    tokens = out.sequences[0].tolist()
    narrowed = 0
    for i, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        got = sampler.distribution(logits[0], tokens[: len(prompt) + i])
        expected = torch.softmax(scores[0].float(), dim=-1)
        assert torch.equal(got, expected)
        narrowed += int((got == 0).sum())
    cuts = options.get("top_k", 0) in range(1, VOCAB) or options.get("top_p", 1) < 1 or "min_p" in options
    assert (narrowed > 0) == cuts


@pytest.mark.parametrize("penalty", [1.0, 1.5, 0.6])
def test_greedy_choices_are_those_of_greedy_generate(model: LlamaForCausalLM, penalty: float) -> None:
    prompt = [5, 9, 9, 31, 2]
    out = generate(model, prompt, {"do_sample": False, "repetition_penalty": penalty})
    written = out.sequences[0].tolist()[len(prompt) :]
    sampler = TokenSampler(SamplingConfig(repetition_penalty=penalty))
    logits = torch.cat(out.logits)
    assert sampler.greedy_choices(logits, prompt, written) == written  # a whole window at once
    assert sampler.greedy_choices(logits[:1], prompt, ()) == written[:1]
    assert [
        sampler.greedy_choices(logits[i : i + 1], prompt + written[:i], ())[0] for i in range(6)
    ] == written


def test_the_repetition_penalty_of_a_window_row_counts_the_tokens_before_it_only() -> None:
    logits = torch.zeros(3, 4)
    logits[:, 2], logits[:, 1] = 2.0, 1.5
    sampler = TokenSampler(SamplingConfig(repetition_penalty=2.0))
    # token 2 is chosen until it has been written; then 2.0 / 2 is below 1.5
    assert sampler.greedy_choices(logits, [0], [3, 2]) == [2, 2, 1]


@pytest.mark.parametrize("bad", [[0.0, torch.nan, 1.0], [torch.nan] * 3, [1.0, torch.inf, 0.0]])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_the_likeliest_of_what_is_no_number_is_nothing(bad: list[float], penalty: float) -> None:
    sampler = TokenSampler(SamplingConfig(repetition_penalty=penalty))
    logits = torch.tensor([[0.0, 3.0, 1.0], bad])
    assert sampler.greedy_choices(logits, [0], [1]) == [1, NO_CHOICE]
    with pytest.raises(CheckpointError, match="files may be damaged"):
        sampler.next_token(logits[1], [0])


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sampler = TokenSampler(SamplingConfig(temperature=0.5, top_k=2, repetition_penalty=1.7))
    sampler.distribution(logits[0], [1, 2, 3])
    sampler.greedy_choices(logits, [1, 2], [3, 4])
    assert torch.equal(logits, before)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20), st.floats(0.05, 5), st.integers(0, 25),
    st.floats(0.001, 1), st.floats(0, 1), st.floats(0.1, 3),
)  # fmt: skip
@settings(max_examples=100)
def test_any_setting_gives_a_distribution_that_can_be_drawn_from(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    config = SamplingConfig(temperature, top_p, top_k, min_p, penalty, seed=0)
    sampler = TokenSampler(config)
    p = sampler.distribution(torch.tensor(logits), [0, 1, 1])
    assert p.dtype == torch.float32
    assert p.shape == (len(logits),)
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    assert p[sampler.draw(p)] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2},
        {"temperature": 1.0, "repetition_penalty": 2},
        {"temperature": 1, "top_p": 1, "min_p": 0},
        {"temperature": 1.0, "min_p": 1},
    ],
    ids=str,
)
def test_whole_numbers_are_as_good_as_fractions(options: dict[str, Any]) -> None:
    logits = torch.tensor([3.0, 1.0, 0.5, -2.0])
    whole = TokenSampler(SamplingConfig(**options)).distribution(logits, [0])
    fractions = {name: float(value) for name, value in options.items()}
    assert torch.equal(whole, TokenSampler(SamplingConfig(**fractions)).distribution(logits, [0]))


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-40])
def test_a_temperature_close_to_zero_is_refused_or_draws_the_likeliest_token(temperature: float) -> None:
    try:
        config = SamplingConfig(temperature=temperature, seed=1)
    except ConfigError:
        return
    sampler = TokenSampler(config)
    assert sampler.draw(sampler.distribution(torch.tensor([1.0, 9.0, 8.0]), [0])) == 1


def stream(seed: int | None, draws: int = 200) -> list[float]:
    sampler = TokenSampler(SamplingConfig(temperature=1.0, seed=seed))
    p = torch.softmax(torch.arange(10.0) / 3, 0)
    return [value for _ in range(draws) for value in (sampler.draw(p), sampler.uniform())]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_a_seed_means_the_same_stream_whatever_else_draws_random_numbers(seed: int) -> None:
    first = stream(seed)
    torch.manual_seed(99)
    torch.rand(7)
    assert stream(seed) == first
    assert stream(seed ^ 1) != first


def test_without_a_seed_every_answer_is_another_and_says_its_seed() -> None:
    assert stream(None) != stream(None)
    sampler = TokenSampler(SamplingConfig(temperature=1.0))
    again = TokenSampler(SamplingConfig(temperature=1.0, seed=sampler.seed))
    assert [sampler.uniform() for _ in range(5)] == [again.uniform() for _ in range(5)]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.5, float("nan")], [float("inf"), 1.0]])
def test_what_is_no_probability_is_refused(weights: list[float]) -> None:
    with pytest.raises(CheckpointError, match="files may be damaged"):
        TokenSampler(SamplingConfig(temperature=1.0, seed=2)).draw(torch.tensor(weights))


def test_the_last_token_with_a_chance_is_drawn_at_most() -> None:
    sampler = TokenSampler(SamplingConfig(temperature=1.0, seed=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *_, **options: torch.ones((), dtype=options["dtype"]))
        assert sampler.draw(torch.tensor([0.2, 0.3, 0.0, 0.0])) == 1
        patch.setattr(torch, "rand", lambda *_, **options: torch.zeros((), dtype=options["dtype"]))
        assert sampler.draw(torch.tensor([0.0, 0.2, 0.3])) == 1


def test_draws_follow_weights_that_do_not_sum_to_one() -> None:
    sampler = TokenSampler(SamplingConfig(temperature=1.0, seed=2))
    weights = torch.tensor([0.0, 3e-4, 1e-4, 0.0])
    drawn: Tensor = torch.tensor([sampler.draw(weights) for _ in range(4000)])
    assert set(drawn.tolist()) == {1, 2}
    assert float((drawn == 1).float().mean()) == pytest.approx(0.75, abs=0.03)
    uniforms = [sampler.uniform() for _ in range(4000)]
    assert 0 <= min(uniforms) < 0.01
    assert 0.99 < max(uniforms) < 1


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6), st.integers(0, 99)
)
@settings(max_examples=60)
def test_the_penalty_counts_every_token_of_a_text_that_grows_shrinks_and_changes(
    steps: list[tuple[int, int]], seed: int
) -> None:
    chance = random.Random(seed)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    sampler, text = TokenSampler(SamplingConfig(repetition_penalty=1.7)), [1]
    for kept, added in steps:
        text = text[:kept] + [chance.randrange(VOCAB) for _ in range(added)] or [2]
        fresh = TokenSampler(SamplingConfig(repetition_penalty=1.7))
        assert torch.equal(sampler._scored(logits, text), fresh._scored(logits, text))
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[text] = True
        expected = torch.where(seen, torch.where(logits < 0, logits * 1.7, logits / 1.7), logits)
        assert torch.allclose(fresh._scored(logits, text), expected)
