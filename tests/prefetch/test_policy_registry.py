"""Policies by name: the ones that exist, fresh each time, and a clear word about those that do not."""

from __future__ import annotations

import pytest

from localmoe.core.config import EngineConfig
from localmoe.core.errors import ConfigError
from localmoe.core.events import DraftFinished, DraftRouted, Rates, RatesMeasured, StepStarted
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.registry import POLICIES, check_policy, decides_within_passes, make_policy

SHAPE = CacheShape(2, 8, 2, 4)


def test_every_policy_is_made_under_the_name_that_it_gives_itself() -> None:
    assert list(POLICIES) == ["on-demand", "next-gate", "moe-infinity", "adapmoe", "sp-moe", "moe-speq"]
    for name in POLICIES:
        assert check_policy(name) == name
        policy = make_policy(name, SHAPE)
        assert policy.name == name
        assert list(policy.observe(StepStarted(0, 2))) == []
        assert make_policy(name, SHAPE) is not policy


def test_the_default_policy_exists() -> None:
    assert EngineConfig().policy in POLICIES


@pytest.mark.parametrize("name", ["", "lru", "MoE-SpeQ", "moe_speq", " moe-speq"])
def test_an_unknown_policy_is_refused_with_the_names_that_there_are(name: str) -> None:
    for ask in (check_policy, lambda wanted: make_policy(wanted, SHAPE)):
        with pytest.raises(ConfigError, match="choose one of") as caught:
            ask(name)
        assert all(known in str(caught.value) for known in POLICIES)
        assert f"'{name}'" in str(caught.value)


def test_the_table_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        POLICIES["mine"] = POLICIES["on-demand"]  # type: ignore[index]


def test_policies_say_whether_they_decide_within_a_pass() -> None:
    within = {name for name in POLICIES if decides_within_passes(name)}
    assert within == {"next-gate", "moe-infinity", "adapmoe"}
    with pytest.raises(ConfigError, match="choose one of"):
        decides_within_passes("lru")


def test_variants_for_comparisons_can_be_had_and_are_not_offered() -> None:
    for name in ("single-sooner", "single-later", "sp-moe@0", "sp-moe@3"):
        assert name not in POLICIES and check_policy(name) == name and not decides_within_passes(name)
        assert list(make_policy(name, SHAPE).observe(StepStarted(0, 2))) == []
    cutoff = make_policy("sp-moe@1", SHAPE)
    cutoff.observe(RatesMeasured(Rates(1e-9, 1.0, 1.0)))  # by which all layers would be prefetched for
    assert [len(cutoff.observe(DraftRouted(0, layer, (1, 2), (0.5, 0.5)))) for layer in (0, 1)] == [2, 0]
    for name in ("sp-moe@", "sp-moe@x", "sp-moe@-1", "moe-speq@2"):
        with pytest.raises(ConfigError, match="choose one of"):
            check_policy(name)


def test_single_prefetches_are_one_round_a_step() -> None:
    sooner, later = make_policy("single-sooner", SHAPE), make_policy("single-later", SHAPE)
    story = (
        StepStarted(0, 2), DraftRouted(0, 1, (3, 8), (0.5, 0.5)), DraftRouted(1, 0, (2, 4), (0.5, 0.5)),
        DraftFinished(2),
    )  # fmt: skip
    asked = [[[r.key for r in policy.observe(e)] for e in story] for policy in (sooner, later)]
    assert asked[0] == [[], [(1, 3)], [], []], "the first token's, and no expert that is none"
    assert asked[1] == [[], [], [], [(0, 2), (0, 4), (1, 3)]]
    assert [list(later.observe(e)) for e in (StepStarted(1, 0), DraftFinished(0))] == [[], []]
