"""Which published configs need code of their own, by what they name."""

from __future__ import annotations

from typing import Any

import pytest

from localmoe.model.own_code import needs_own_code

CODE = "AutoModelForCausalLM"
KNOWN: list[tuple[str, dict[str, Any]]] = [  # as they were published
    (
        "deepseek_v2",
        {CODE: "modeling_deepseek.DeepseekV2ForCausalLM", "AutoModel": "modeling_deepseek.Other"},
    ),
    (
        "phimoe",
        {CODE: "modeling_phimoe.PhiMoEForCausalLM", "AutoConfig": "configuration_phimoe.PhiMoEConfig"},
    ),
    ("nemotron_h", {CODE: "modeling_nemotron_h.NemotronHForCausalLM"}),
    ("minimax_m2", {CODE: "modeling_minimax_m2.MiniMaxM2ForCausalLM"}),
    ("ernie4_5_moe", {CODE: "modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM"}),
]


@pytest.mark.parametrize(("model_type", "auto_map"), KNOWN)
def test_code_that_transformers_has_itself_is_not_needed(model_type: str, auto_map: dict[str, Any]) -> None:
    assert not needs_own_code({"model_type": model_type, "auto_map": auto_map})
    for unknown in ("no_such_type", None, 3, [model_type], {}):
        assert needs_own_code({"model_type": unknown, "auto_map": auto_map})


@pytest.mark.parametrize(
    "auto_map",
    [{CODE: "modeling.Evil"}, {CODE: "modeling.Qwen2ForCausalLM"}, {CODE: 3}, {CODE: ["a.B"]}, ["a"], "a", 7],
)
def test_other_code_is_needed(auto_map: object) -> None:
    assert needs_own_code({"model_type": "qwen2_moe", "auto_map": auto_map})


@pytest.mark.parametrize(
    ("architectures", "needed"),
    [(["Qwen2MoeForCausalLM"], False), (["OtherForCausalLM"], True), ([], True), (None, True), ([3], True)],
)
def test_where_it_defines_no_model_the_architecture_tells(architectures: object, needed: bool) -> None:
    config = {"model_type": "qwen2_moe", "auto_map": {"AutoTokenizer": ["a.B", None]}}
    assert needs_own_code({**config, "architectures": architectures}) == needed


def test_most_configs_name_none() -> None:
    assert not needs_own_code({"model_type": "no_such_type"}) and not needs_own_code({"auto_map": {}})
