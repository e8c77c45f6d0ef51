"""Steps on the device whose tokens a grammar has to allow, with passes that a table plays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from model.device_table import EXPERTS, LAYERS, PENALISED, PROMPT, SAMPLED, HastyPolicy, Moody, Rig
from model.test_looked_up_steps import Guesses
from speculative.table_model import Rule, Table
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.core.events import StepFinished, StepStarted
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import Policy
from localmoe.speculative.forced_tokens import ForcedOrFound
from localmoe.speculative.prompt_lookup import PromptLookupDrafter

pytestmark = pytest.mark.interpreted
LENGTHS = st.lists(st.sampled_from([0, 0, 0, 0, 1, 3, 6]), max_size=16)


def drafter(kind: str, table: Table, end: frozenset[int], rule: Rule) -> PromptLookupDrafter | None:
    return {
        "draft": None, "lookup": PromptLookupDrafter(end), "guesses": Guesses(table, 5, end),
        "forced": ForcedOrFound(end, rule),
    }[kind]  # fmt: skip


@settings(max_examples=80)
@given(
    seed=st.integers(0, 999), slots=st.integers(1, 13), lengths=LENGTHS,
    make=st.sampled_from([MoeSpeqPolicy, OnDemandPolicy, HastyPolicy]), events=st.integers(1, 25),
    limit=st.integers(1, 40), end=st.sets(st.integers(0, 3), max_size=1),
    kind=st.sampled_from(["draft", "lookup", "guesses", "forced"]), forces=st.sampled_from([0.0, 0.7]),
    near=st.booleans(),
)  # fmt: skip
def test_greedy_text_is_that_of_asking_the_grammar_before_each_token(
    seed: int, slots: int, lengths: list[int], make: type[Policy], events: int, limit: int, end: set[int],
    kind: str, forces: float, near: bool,
) -> None:  # fmt: skip
    table, ends = Table(agreement=0.8, seed=seed), frozenset(end)
    rule, rig = Rule(table, seed, forces), Rig(table, slots, make)
    lookup = drafter(kind, table, ends, rule)
    loop = rig.loop(Moody(list(lengths)), end=ends, lookup=lookup, grammar=rule, near=near)
    said: list[int] = []
    steps = loop.run(PROMPT, limit)
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    steps.close()
    expected = rule.greedy(table, PROMPT, limit, ends)
    assert said == expected[: len(said)] and len(said) >= min(events, len(expected))
    rig.experts.check()
    rest = [token for step in rig.loop(2).run([*PROMPT, *said], 9) for token in step.tokens]
    assert rest == table.greedy([*PROMPT, *said], 9), "an answer without a grammar follows"
    rig.experts.check()


@settings(max_examples=8)
@given(seed=st.integers(0, 999), lengths=LENGTHS, config=st.sampled_from([SAMPLED, PENALISED]))
def test_sampled_text_is_allowed_and_the_same_whatever_is_drafted(
    seed: int, lengths: list[int], config: SamplingConfig
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rule, texts = Rule(table, seed), []
    for drafted in ([], lengths):
        rig = Rig(table, 5)
        steps = rig.loop(Moody(list(drafted)), sampling=config, grammar=rule).run(PROMPT, 12)
        texts.append([token for step in steps for token in step.tokens])
        rig.experts.check()
    assert texts[0] == texts[1] and rule.valid(PROMPT, texts[0]) == 12


def test_a_policy_hears_of_each_pass_that_chooses_anew_as_of_a_step() -> None:
    table = Table(agreement=1.0, seed=3)
    rule, rig = Rule(table, 5), Rig(table, 6)
    steps = list(rig.loop(3, grammar=rule).run(PROMPT, 30))
    told: Sequence[object] = [event for event in rig.events if isinstance(event, StepStarted | StepFinished)]
    assert [type(event) for event in told] == [StepStarted, StepFinished] * (len(told) // 2)
    assert len(told) // 2 > len(steps) - 1, "some were chosen anew"


class Seldom(Rule):
    """Now and then the likeliest token is none that may follow."""

    def __init__(self, table: Table) -> None:
        super().__init__(table, 0)
        self._table = table

    def allowed(self, text: Sequence[int], count: int) -> Tensor | None:
        may = torch.ones(count, dtype=torch.bool)
        may[self._table.target(text).argmax()] = len(text) % 9 > 0
        return may

    def valid(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        written = list(text)
        for token in tokens:
            may = self.allowed(written, self.vocab)
            if may is None or not may[token]:
                break
            written.append(token)
        return len(written) - len(text)

    def free(self, text: Sequence[int]) -> bool:
        return len(text) % 9 > 0

    def forced(self, text: Sequence[int]) -> list[int]:
        return []


@pytest.mark.parametrize("near", [False, True])
def test_no_pass_runs_behind_one_to_whose_middle_recurrent_state_may_have_to_go_back(near: bool) -> None:
    table = Table(agreement=0.8, seed=2)
    rule, rig = Seldom(table), Rig(table, LAYERS * EXPERTS)
    loop = rig.loop(Moody([0] * 50 + [3] * 20), grammar=rule, near=near)
    said = [token for step in loop.run(PROMPT, 80) for token in step.tokens]
    assert said == rule.greedy(table, PROMPT, 80, frozenset())
    assert rig.passes.went_behind == (not near)
    assert rig.passes.ran_behind > 5, "where nothing is refused passes go ahead"
