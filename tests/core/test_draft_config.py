"""Settings of a draft: defaults, provenance, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from localmoe.core.draft_config import BITS, GROUP_SIZES, METHODS, DraftSettings, GptqSettings
from localmoe.core.errors import ConfigError


def test_without_wishes_a_draft_is_gptq_of_four_bits() -> None:
    settings = DraftSettings()
    assert (settings.method, settings.gptq.bits, settings.gptq.group_size) == ("gptq", 4, 128)
    assert settings.calibration is None and settings.budget_bytes == 8 << 30


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_width_and_group_size_goes_with_gptq_and_rounding(bits: int, group_size: int) -> None:
    for method in METHODS:
        if method != "nf4":
            DraftSettings(method, GptqSettings(bits=bits, group_size=group_size))


@pytest.mark.parametrize(
    ("gptq", "other", "sentence"),
    [
        ({"bits": 5}, {}, "A draft of 5 bits by method 'gptq' cannot be built: use .* 2, 3, 4, 8 bits"),
        (
            {},
            {"method": "awq"},
            "A draft of 4 bits by method 'awq' cannot be built: use method gptq or nf4 or",
        ),
        (
            {},
            {"method": "nf4"},
            "An NF4 draft of 4 bits in groups of 128 cannot be built: NF4 has 4 bits and",
        ),
        ({"bits": 3, "group_size": 64}, {"method": "nf4"}, "An NF4 draft of 3 bits in groups of 64 cannot"),
        ({"group_size": 100}, {}, "Group size 100 is out of range: use one of 32, 64, 128, 256"),
        (
            {"num_tokens": 4095},
            {},
            "4,095 calibration tokens are too few: give at least 4,096, which are 8 sequences",
        ),
        ({"sequence_length": 0}, {}, "Sequences of 0 tokens are too short: give at least 1"),
        ({"seed": -1}, {}, r"Seed -1 is out of range: use 0 to 2\^63 - 1"),
        ({"seed": 1 << 63}, {}, "Seed 9223372036854775808 is out of range"),
        ({}, {"budget_bytes": 0}, "A budget of 0 B is out of range: give a positive size"),
        ({}, {"budget_bytes": -1}, "A budget of -1 B is out of range"),
    ],
)
def test_what_makes_no_draft_is_refused_in_one_sentence(
    gptq: dict[str, Any], other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}") as refusal:
        DraftSettings(gptq=GptqSettings(**gptq), **other)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def test_the_extremes_are_settings() -> None:
    for seed in (0, (1 << 63) - 1):
        DraftSettings(gptq=GptqSettings(num_tokens=8, sequence_length=1, seed=seed), budget_bytes=1)


def test_provenance_names_each_setting_once() -> None:
    settings = GptqSettings(num_tokens=7, sequence_length=3, gate_weighted=True, act_order=False)
    assert settings.provenance() == {
        "num_tokens": 7, "sequence_length": 3, "gate_weighted": True, "act_order": False
    }  # fmt: skip
