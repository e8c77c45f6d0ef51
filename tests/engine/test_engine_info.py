"""What an engine says of the CPU that computes experts for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import load_with_slots

from localmoe.core.config import SamplingConfig
from localmoe.engine.info import cpu_rate
from localmoe.experts.lane_block import LaneRates


def test_the_rate_is_that_of_an_experts_first_token_while_the_lane_is_there() -> None:
    lane = SimpleNamespace(failure="", measured=LaneRates(30.0, 200.0, 10.0, 300.0))
    parts: Any = SimpleNamespace(
        runner=SimpleNamespace(passes=SimpleNamespace(lane=lane)),
        prepared=SimpleNamespace(footprint=SimpleNamespace(expert_bytes=20_000_000)),
    )
    assert cpu_rate(parts) == pytest.approx(100e9)
    lane.failure = "the CPU lane was given up"
    assert cpu_rate(parts) is None
    parts.runner.passes.lane = None
    assert cpu_rate(parts) is None


def test_an_engine_on_the_cpu_has_no_such_rate_and_says_what_its_makers_recommend() -> None:
    with load_with_slots("demo", 20, device="cpu") as engine:
        assert engine.info().cpu_bytes_per_s is None
        assert engine.info().own_sampling == SamplingConfig(temperature=0.7, top_p=0.9)
