"""Output depends on model, prompt and seed alone: not on policy, budget, link speed or draft length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.engines import ask, load_with_slots

from localmoe.core.config import DrafterName, DraftLength, SamplingConfig
from localmoe.engine import Engine
from localmoe.prefetch.registry import POLICIES

ARCHITECTURE = "qwen3_moe"  # 3 x 8 experts, 3 a token
PROMPT = "Once upon a time there was"
NUM_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """Everything that must not matter."""

    num_slots: int
    link: float | None
    policy: str
    draft_length: DraftLength
    drafter: DrafterName = "self"


OTHERS = [policy for policy in POLICIES if policy not in ("on-demand", "moe-speq")]
SETTINGS = [
    *(
        Setting(slots, link, policy, draft_length)
        for (slots, link), policy, draft_length in product(
            [(3, None), (8, None), (24, None), (6, 200e6)], ["on-demand", "moe-speq"], [0, 1, 5, 12, "auto"]
        )
    ),
    *(Setting(3, None, policy, 5) for policy in OTHERS),
    *(Setting(6, 200e6, policy, 0) for policy in OTHERS),
    *(Setting(6, None, policy, 5, "prompt-lookup") for policy in POLICIES),
]
PLAIN = Setting(24, None, "on-demand", 0)
Tiny = Callable[[str], tuple[Path, Any]]


def sampled(settings: list[Setting]) -> Any:
    """Those of them in plain runs where slots are fewest, or the link is slow."""
    slow = [[pytest.mark.slow] * (setting.num_slots in (8, 24)) for setting in settings]
    cases = [pytest.param(one, id=str(one), marks=marks) for one, marks in zip(settings, slow, strict=True)]
    return pytest.mark.parametrize("setting", cases)


@dataclass
class Answers:
    """Engines by (slots, link speed, drafter), and what they answered."""

    folder: Path
    engines: dict[tuple[int, float | None, DrafterName], Engine] = field(default_factory=dict)
    looked_up: int = 0

    def tokens(self, setting: Setting, sampling: SamplingConfig) -> list[int]:
        key = (setting.num_slots, setting.link, setting.drafter)
        if key not in self.engines:
            self.engines[key] = load_with_slots(
                self.folder, key[0], emulated_link_bytes_per_s=key[1], drafter=key[2]
            )
        how: dict[str, Any] = {"policy": setting.policy, "draft_length": setting.draft_length}
        answer = ask(self.engines[key], PROMPT, NUM_TOKENS, sampling=sampling, **how)
        if setting.drafter == "prompt-lookup":
            assert self.engines[key].info().draft == "prompt lookup"
            self.looked_up += answer.stats.drafted
        return answer.tokens


@pytest.fixture(scope="module")
def answers(tiny: Tiny) -> Iterator[Answers]:
    made = Answers(tiny(ARCHITECTURE)[0])
    yield made
    for engine in made.engines.values():
        engine.close()


@pytest.fixture(scope="module")
def expected(answers: Answers) -> Callable[[SamplingConfig], list[int]]:
    return cache(lambda sampling: answers.tokens(PLAIN, sampling))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_greedy_output_is_the_same_for_every_setting(
    setting: Setting, answers: Answers, expected: Callable[[SamplingConfig], list[int]]
) -> None:
    assert answers.tokens(setting, SamplingConfig()) == expected(SamplingConfig())


SAMPLED = SamplingConfig(temperature=0.8, top_p=0.95, top_k=40, min_p=0.01, repetition_penalty=1.1, seed=11)


@sampled([s for s in SETTINGS if s.draft_length == 0])
def test_sampled_output_without_drafts_is_the_same_for_every_policy_budget_and_link(
    setting: Setting, answers: Answers, expected: Callable[[SamplingConfig], list[int]]
) -> None:
    assert answers.tokens(setting, SAMPLED) == expected(SAMPLED)


@sampled([s for s in SETTINGS if s.draft_length == 5 and s.drafter == "self"])
def test_sampled_output_with_drafts_of_one_length_is_the_same_for_every_policy_budget_and_link(
    setting: Setting, answers: Answers
) -> None:
    """Drafts draw from the same random stream: another length gives another answer, equally distributed."""
    reference = Setting(24, None, "on-demand", 5)
    assert answers.tokens(setting, SAMPLED) == answers.tokens(reference, SAMPLED)


def test_another_seed_gives_another_answer_and_a_greedy_answer_needs_none(answers: Answers) -> None:
    def sampled(seed: int | None) -> list[int]:
        return answers.tokens(PLAIN, SamplingConfig(temperature=1.0, seed=seed))

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(None) != sampled(None), "without a seed every answer draws a fresh one"
    assert answers.tokens(PLAIN, SamplingConfig(seed=1)) == answers.tokens(PLAIN, SamplingConfig(seed=2))


def test_prompt_lookup_found_something_to_propose(answers: Answers) -> None:
    answers.tokens(Setting(6, None, "moe-speq", 5, "prompt-lookup"), SamplingConfig())
    assert answers.looked_up > 0
