"""Steps on the device without drafts, which run behind each other, with passes that a table plays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from model.device_table import PROMPT, HastyPolicy, Moody, Rig
from speculative.table_model import Table

from localmoe.model.device_steps import RUN_BEHIND_AFTER
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import Policy


@pytest.mark.interpreted
@settings(max_examples=60)
@given(
    st.integers(0, 999), st.integers(1, 13), st.lists(st.sampled_from([0, 0, 0, 0, 1, 3]), max_size=24),
    st.sampled_from([MoeSpeqPolicy, OnDemandPolicy, HastyPolicy]), st.integers(1, 25), st.integers(1, 40),
    st.sets(st.integers(0, 3), max_size=1),
)  # fmt: skip
def test_plain_steps_run_behind_each_other_between_others_and_an_answer_may_end_anywhere(
    seed: int, slots: int, lengths: list[int], make: type[Policy], events: int, limit: int, end: set[int]
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig = Rig(table, slots, make)
    steps = rig.loop(Moody(list(lengths)), end=frozenset(end)).run(PROMPT, limit)
    said: list[int] = []
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    steps.close()
    assert said == table.greedy(PROMPT, len(said))
    rig.experts.check()
    rest = [token for step in rig.loop(2).run([*PROMPT, *said], 9) for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, len(said) + 9)
    rig.experts.check()


@pytest.mark.interpreted
@pytest.mark.parametrize(("make", "behind"), [(OnDemandPolicy, True), (HastyPolicy, False)])
def test_passes_run_behind_each_other_unless_a_copy_is_wanted(make: type[Policy], behind: bool) -> None:
    rig = Rig(Table(seed=2), 5, make)
    opened = []
    memory = rig.experts.memory
    open_behind = memory.open_behind
    memory.open_behind = lambda: (opened.append(memory._passes), open_behind())  # type: ignore[method-assign]
    said = [token for step in rig.loop(0).run(PROMPT, 20) for token in step.tokens]
    assert said == rig.passes.table.greedy(PROMPT, 20)
    # of 19 steps the first three wait for nothing else, and behind the last one comes none
    assert len(opened) == (19 - RUN_BEHIND_AFTER if behind else 0)
    assert rig.passes.issued.count("window") == 20  # none in vain
