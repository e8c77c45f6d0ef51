"""Settings are checked where they are made: what is in range is kept, all else is a ConfigError."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.config import (
    MAX_DRAFT_LENGTH,
    EngineConfig,
    GenerationRequest,
    SamplingConfig,
    check_draft_length,
    parse_draft_length,
)
from localmoe.core.errors import ConfigError, LocalMoeError
from localmoe.core.types import Message

HELLO = (Message("user", "hello"),)


@given(st.integers(0, MAX_DRAFT_LENGTH))
def test_draft_lengths_in_range_are_kept_as_numbers_and_as_text(length: int) -> None:
    assert check_draft_length(length) == length
    assert parse_draft_length(f" {length} ") == length


def test_auto_is_a_draft_length() -> None:
    assert check_draft_length("auto") == "auto"
    assert parse_draft_length(" AUTO ") == "auto"


@pytest.mark.parametrize("value", [-1, 65, 10**30, True, False, 1.0, 2.5, "4", "AUTO", "", None, math.nan])
def test_other_draft_lengths_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="Draft length"):
        check_draft_length(value)
    with pytest.raises(ConfigError):
        EngineConfig(draft_length=value)


@pytest.mark.parametrize("text", ["", "-1", "65", "four", "1.5", "1e1", "nan", "9" * 6000, "auto 4", "none"])
def test_a_typed_draft_length_that_is_none_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"Draft length") as caught:
        parse_draft_length(text)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((EngineConfig, {name: value}) for value in (2.5, True, math.nan, "8", 16.0)
          for name in ("vram_budget_bytes", "context", "cpu_threads", "draft_bits")),
        *((SamplingConfig, {name: value}) for value in (2.5, True, "1", 1.0) for name in ("top_k", "seed")),
        *((SamplingConfig, {name: value}) for value in (None, True, "0.5")
          for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *((GenerationRequest, {"messages": HELLO, "max_new_tokens": value})
          for value in (2.5, True, math.nan, "5")),
        (EngineConfig, {"device": "tpu"}), (EngineConfig, {"dtype": "float16"}),
        (EngineConfig, {"draft_dir": "/tmp"}), (EngineConfig, {"emulated_link_bytes_per_s": 1e-300}),
        *((EngineConfig, {"emulated_link_bytes_per_s": value}) for value in (True, "2GB/s")),
        (GenerationRequest, {"messages": HELLO, "thinking": "loud"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_where_it_is_given(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**options)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "options",
    [
        {"vram_budget_bytes": 0},
        {"vram_budget_bytes": -1},
        {"context": 0},
        {"context": 15},
        {"context": -4096},
        {"emulated_link_bytes_per_s": 0.0},
        {"emulated_link_bytes_per_s": -2e9},
        {"emulated_link_bytes_per_s": math.inf},
        {"emulated_link_bytes_per_s": math.nan},
    ],
    ids=str,
)
def test_an_engine_setting_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"out of range|too small"):
        EngineConfig(**options)


def test_a_better_draft_is_built_only_if_asked_for() -> None:
    assert EngineConfig().improve_draft is False
    assert dataclasses.replace(EngineConfig(), improve_draft=True).improve_draft is True


def test_engine_settings_in_range_are_kept() -> None:
    config = EngineConfig(vram_budget_bytes=1, context=16, draft_length=64, emulated_link_bytes_per_s=1.0)
    assert (config.vram_budget_bytes, config.context, config.draft_length) == (1, 16, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.context = 32  # type: ignore[misc]


RANGES = {
    "temperature": (0.0, 10.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.1, 10.0),
    "seed": (0, 2**63 - 1),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_every_sampling_range_are_allowed_and_just_beyond_is_not(name: str) -> None:
    low, high = RANGES[name]
    whole = isinstance(low, int)
    assert getattr(SamplingConfig(**{name: high}), name) == high
    if name == "top_p":  # nothing would be left to draw from
        with pytest.raises(ConfigError, match="above 0"):
            SamplingConfig(top_p=0.0)
    else:
        assert getattr(SamplingConfig(**{name: low}), name) == low
    beyond = (low - 1, high + 1) if whole else (math.nextafter(low, -99), math.nextafter(high, 99))
    for value in beyond:
        with pytest.raises(ConfigError, match="out of range"):
            SamplingConfig(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sampling_setting_that_is_no_number_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize("name", ["seed", "top_k", "temperature"])
def test_a_number_too_large_for_a_float_is_refused_like_any_other(name: str) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        SamplingConfig(**{name: 10**400})


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingConfig().greedy
    assert SamplingConfig(temperature=0, top_k=5).greedy
    assert not SamplingConfig(temperature=0.01).greedy


def test_a_request_has_messages_or_a_prompt_and_not_both() -> None:
    assert GenerationRequest(messages=HELLO).prompt is None
    assert GenerationRequest(prompt="").prompt == ""  # refused later, by name, where the tokens are known
    assert GenerationRequest(prompt_token_ids=()).prompt_token_ids == ()  # the same
    two = ({"messages": HELLO, "prompt": "hello"}, {"messages": HELLO, "prompt": ""})
    ids = ({"messages": HELLO, "prompt_token_ids": (1,)}, {"prompt": "hello", "prompt_token_ids": ()})
    for wrong in ({}, *two, *ids):
        with pytest.raises(ConfigError, match="messages or a prompt"):
            GenerationRequest(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"max_new_tokens": -3}, {"draft_length": -1}])
def test_a_request_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GenerationRequest(messages=HELLO, **options)


def test_every_error_of_the_package_has_one_root() -> None:
    from localmoe.core import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) > 10
    assert all(issubclass(cls, LocalMoeError) and cls.__doc__ for cls in classes)


def test_a_drafter_is_one_of_those_there_are_and_reads_a_draft_only_if_it_is_the_model_itself() -> None:
    with pytest.raises(ConfigError, match="There is no drafter 'eagle': choose one of auto, self, prompt-"):
        EngineConfig(drafter="eagle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave the draft folder out"):
        EngineConfig(drafter="prompt-lookup", draft_dir=Path("somewhere"))
    assert EngineConfig(drafter="prompt-lookup").drafter == "prompt-lookup"
