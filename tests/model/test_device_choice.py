"""What a device knows of the text is the text, however passes were rolled back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from localmoe.core.config import SamplingConfig
from localmoe.model.device_choice import DeviceChoice
from localmoe.speculative.sampling import TokenSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 5
PENALTY = SamplingConfig(repetition_penalty=1.7)
token = st.integers(0, VOCAB - 1)


def on_device(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


def made() -> DeviceChoice:
    choice = DeviceChoice(DEVICE)
    choice.prepare(torch.zeros(1, VOCAB, device=DEVICE))
    return choice


@settings(max_examples=30)
@given(
    st.lists(token, min_size=1, max_size=6),
    st.lists(
        st.tuples(st.lists(token, min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 4)), max_size=4
    ),
    st.integers(0, 99),
)
def test_each_row_is_penalised_for_the_text_before_it(
    text: list[int], windows: list[tuple[list[int], int, int]], seed: int
) -> None:
    choice, sampler = made(), TokenSampler(PENALTY)
    choice.begin(PENALTY, 0, text)
    generator = torch.Generator().manual_seed(seed)
    for drafted, padding, kept in windows:
        rows, start = [text[-1], *drafted], len(text) - 1
        for i, written in enumerate(rows):  # as draft passes do, one by one
            choice.note(on_device(start + i), on_device(written))
        tokens = on_device(*rows, *[4] * padding)
        choice.note(on_device(start), tokens, on_device(len(rows)))
        logits = torch.randn(len(tokens), VOCAB, generator=generator)
        positions = on_device(*range(start, start + len(tokens)))
        got = choice.choose(logits.to(DEVICE), positions)[: len(rows)].cpu()
        assert got.tolist() == sampler.greedy_choices(logits[: len(rows)], text, drafted)
        text = [*text, *drafted[:kept], int(got[min(kept, len(drafted))])]


def test_an_answer_without_penalty_keeps_no_text_and_one_without_sampling_takes_the_largest() -> None:
    choice = made()
    assert choice.kind == "argmax"
    for config, kind in (
        (SamplingConfig(), "argmax"), (SamplingConfig(temperature=0.5), "sampled"), (PENALTY, "penalised"),
        (SamplingConfig(temperature=2.0, repetition_penalty=0.5), "penalised"),
    ):  # fmt: skip
        choice.begin(config, 1, [0, 3])
        assert choice.kind == kind
        choice.expect(SamplingConfig(temperature=0.5))
        assert choice.kind == "sampled"
        choice.expect(config)  # of an answer to come: passes of its prompt, whose choice nobody reads
        assert choice.kind == kind
    choice.begin(SamplingConfig(), 1, [0, 3])
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]], device=DEVICE)
    choice.note(on_device(1), on_device(2))
    assert choice.choose(logits, on_device(1)).tolist() == [1]
