"""What an engine says of the CPU that computes experts for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import load_with_slots

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


def test_without_a_gpu_there_is_none() -> None:
    with load_with_slots("demo", 20, device="cpu") as engine:
        assert engine.info().cpu_bytes_per_s is None
