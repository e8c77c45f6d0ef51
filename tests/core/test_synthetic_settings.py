"""What a synthetic benchmark is told to simulate: parsed, checked, shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localmoe.core.errors import ConfigError
from localmoe.core.synthetic import RoutingSpec, SyntheticSettings, parse_routing, parse_share


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("uniform", RoutingSpec("uniform")),
        ("sticky:0.35", RoutingSpec("sticky", repeat=0.35)),
        ("sticky:1", RoutingSpec("sticky", repeat=1.0)),
        (" sticky:0 ", RoutingSpec("sticky", repeat=0.0)),
        ("trace:/data/a:b.npz", RoutingSpec("trace", path=Path("/data/a:b.npz"))),
    ],
)
def test_a_routing_is_parsed_and_shown_as_it_was_typed(text: str, spec: RoutingSpec) -> None:
    assert parse_routing(text) == spec
    assert parse_routing(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    ["", "Uniform", "uniform:", "uniform:0.5", "sticky", "sticky:", "sticky:x", "sticky:1.01", "sticky:-0.1",
     "sticky:nan", "trace", "trace:", "random", "0.5"],
)  # fmt: skip
def test_what_is_no_routing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_routing(text)


@pytest.mark.parametrize("text", ["", "x", "-0.01", "1.5", "nan", "inf", "90%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="0 to 1"):
        parse_share(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"acceptance": 1.2},
        {"acceptance": float("nan")},
        {"routing": RoutingSpec("uniform"), "match": -0.5},
        {"match": 0.5},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SyntheticSettings(**wrong)


def test_a_match_needs_a_routing_to_match() -> None:
    with pytest.raises(ConfigError, match="routing"):
        SyntheticSettings(match=1.0)


def test_settings_say_what_is_simulated_and_what_is_left_to_the_random_weights() -> None:
    assert str(SyntheticSettings()) == "routing of random weights, acceptance of random weights"
    some = SyntheticSettings(RoutingSpec("sticky", repeat=0.5), acceptance=0.8, match=0.95)
    assert str(some) == "routing sticky:0.5, match 0.95, acceptance 0.8"
    assert some.as_dict() == {"routing": "sticky:0.5", "acceptance": 0.8, "match": 0.95, "seed": 0}
    assert SyntheticSettings().as_dict() == {"routing": None, "acceptance": None, "match": None, "seed": 0}
