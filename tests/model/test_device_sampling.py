"""Sampled answers of steps on the device, with passes that a table plays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from model.device_table import PENALISED, PROMPT, SAMPLED, HastyPolicy, Moody, Rig, sampled
from speculative.table_model import Table

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import CheckpointError
from localmoe.model.device_draft_steps import DeviceDraftSteps
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import Policy

pytestmark = pytest.mark.interpreted


@settings(max_examples=8)
@given(
    st.integers(0, 999), st.integers(1, 13), st.lists(st.sampled_from([0, 0, 0, 0, 1, 3]), max_size=9),
    st.sampled_from([SAMPLED, PENALISED]), st.sampled_from([OnDemandPolicy, HastyPolicy]),
)  # fmt: skip
def test_a_sampled_answer_is_the_same_whatever_is_drafted_and_whenever_passes_run(
    seed: int, slots: int, lengths: list[int], config: SamplingConfig, make: type[Policy]
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig = Rig(table, slots, make)
    first, *rest = rig.loop(Moody(list(lengths)), sampling=config).run(PROMPT, 11)
    text = [*PROMPT, *first.tokens]  # the prompt's last pass is nobody's but the host's
    assert [token for step in rest for token in step.tokens] == sampled(table, text, 10, config)


@pytest.mark.parametrize("config", [SAMPLED, PENALISED])
def test_the_draft_alone_writes_what_the_rule_says_and_stops_at_what_is_no_number(
    config: SamplingConfig,
) -> None:
    table = Table(agreement=0.3, seed=4)
    rig = Rig(table, 4)
    assert config.seed is not None
    rig.runner.run(PROMPT, "prefill", last_only=True)
    steps = DeviceDraftSteps(rig.runner, config, config.seed)
    text = [*PROMPT, 2]
    for _ in range(3):
        steps.begin(text, 3)
        text += steps.finish().tokens
    table.rows["target"] = table.rows["draft"]
    assert text == [*PROMPT, 2, *sampled(table, [*PROMPT, 2], 12, config)]
    for row in table.rows["draft"].values():
        row.fill_(torch.nan)
    steps.begin(text, 3)
    with pytest.raises(CheckpointError, match="files may be damaged"):
        steps.finish()
    assert rig.tokens(verified=False) == text[:-1]
    steps.close()


@pytest.mark.parametrize("sampling", [SAMPLED, SamplingConfig()], ids=["sampled", "greedy"])
@pytest.mark.parametrize("length", [0, 3])
def test_probabilities_that_are_no_numbers_end_an_answer_with_one_sentence(
    length: int, sampling: SamplingConfig
) -> None:
    table = Table(agreement=0.3, seed=3)
    rig = Rig(table, 4)
    steps = rig.loop(length, sampling=sampling).run(PROMPT, 40)
    said = [token for _ in range(6) for token in next(steps).tokens]
    for row in [*table.rows["target"].values(), *table.rows["draft"].values()]:
        row.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="files may be damaged"):
        for step in steps:
            said += step.tokens
    assert rig.tokens() == [*PROMPT, *said][:-1]
    rig.experts.check()
