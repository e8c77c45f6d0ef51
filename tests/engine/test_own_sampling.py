"""What the makers of a model recommend, read from their generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import CheckpointError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.engine.end_tokens import read_end_tokens
from localmoe.engine.own_sampling import read_own_sampling
from localmoe.engine.random_source import RandomSource
from localmoe.model.shapes import find_shape

SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read(folder: Path, text: str) -> SamplingConfig | None:
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return read_own_sampling(folder)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"do_sample": True, "eos_token_id": [1]}, SamplingConfig(1.0)),  # gpt-oss
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, SamplingConfig(1.0, 0.95, 64)),  # Gemma
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            SamplingConfig(0.6, 0.95, 20),
        ),  # Qwen3
        (
            {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            SamplingConfig(0.7, 0.8, 20, repetition_penalty=1.05),
        ),  # Qwen1.5-MoE
        ({"temperature": 1, "min_p": 0.1, "top_k": None}, SamplingConfig(1.0, min_p=0.1)),
        ({"top_p": 0.9}, SamplingConfig(1.0, 0.9)),
        ({"temperature": 0}, SamplingConfig()),
        ({"temperature": 1e-06, "repetition_penalty": 1.05}, SamplingConfig(repetition_penalty=1.05)),
        ({"do_sample": False}, SamplingConfig()),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1},
         SamplingConfig(repetition_penalty=1.1)),
        ({"do_sample": None, "temperature": 0.5, "top_k": 20.0}, SamplingConfig(0.5, top_k=20)),
        ({"do_sample": True, "temperature": 0.5, "top_k": -1}, SamplingConfig(0.5)),
        ({}, None), ({"_from_model_config": True, "bos_token_id": 1}, None), ({"top_k": -1}, None),
        ({"repetition_penalty": 1.1}, None), ({"temperature": None, "top_p": None}, None),
    ],
)  # fmt: skip
def test_what_models_recommend_is_read(
    values: dict[str, Any], wanted: SamplingConfig | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, json.dumps(values)) == wanted
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", True), ("temperature", -1), ("temperature", 10**400),
        ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.5), ("top_p", [0.9]), ("top_k", 2.5),
        ("top_k", -7), ("top_k", float("inf")), ("top_k", 10**400), ("min_p", {}), ("repetition_penalty", 0),
        ("do_sample", "yes"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_left_out_and_the_log_says_which(
    name: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usable = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 9, "repetition_penalty": 1.1}
    found = read(tmp_path, json.dumps({**usable, name: value}))
    usual = {"temperature": 1.0}  # what do_sample by itself means
    kept = {key: number for key, number in usable.items() if key not in (name, "do_sample")}
    assert found == SamplingConfig(**{**usual, **kept})
    (said,) = caplog.records
    assert said.levelno == logging.WARNING and f"the {name} " in said.getMessage()


def test_a_model_without_the_file_recommends_nothing_and_nor_do_random_weights(tmp_path: Path) -> None:
    assert read_own_sampling(tmp_path) is None
    assert RandomSource(find_shape("olmoe-1b-7b"), SyntheticSettings()).own_sampling is None


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 100_000])
def test_a_damaged_file_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json .*download it again"):
        read(tmp_path, text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200)
@given(values=st.dictionaries(st.sampled_from(SAMPLING), JSON))
def test_whatever_the_values_are_a_model_is_not_refused_for_them(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = read(tmp_path_factory.getbasetemp(), json.dumps(values))
    assert found is None or (found.seed is None and isinstance(found.top_k, int))


@pytest.mark.parametrize("value", [{}, {"a": 1}, [[]], [{}, 5], "x", None, [5, None], 5.0, True, [5, True]])
def test_end_tokens_are_whole_numbers_whatever_stands_there(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": value}})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    found = {7, 5} if isinstance(value, list) and 5 in value else {7}
    assert read_end_tokens(tmp_path) == found
