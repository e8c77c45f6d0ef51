"""Every reason not to run whole passes on a GPU is given to a model that deserves it, and to no other."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_models import (
    ARCHITECTURES,
    RECURRENT_ARCHITECTURE,
    STATEFUL_ARCHITECTURES,
    UNGATED_ARCHITECTURE,
    tiny_config,
)

from localmoe.core.errors import UnsupportedModelError
from localmoe.engine.device_support import why_not_in_kernels, why_not_in_place, why_not_on_device
from localmoe.model.skeleton import Skeleton, _find_experts, skeleton_from_config

MAMBA = {"num_experts": 8, "intermediate_size": 128, "attn_layer_period": 2, "attn_layer_offset": 1}
INDEXED = {"n_routed_experts": 8, "qk_rope_head_dim": 16, "index_head_dim": 32, "first_k_dense_replace": 1}
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def skeleton(architecture: str, **changes: Any) -> Skeleton:
    return skeleton_from_config(tiny_config(architecture, **changes), torch.bfloat16, "the model")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *STATEFUL_ARCHITECTURES])
def test_the_usual_architectures_have_no_reason(architecture: str) -> None:
    made = skeleton(architecture)
    assert why_not_in_kernels(made) == ""
    if importlib.util.find_spec("triton") is not None:
        assert why_not_on_device(made, CUDA, torch.bfloat16) == ""
        assert why_not_on_device(made, CUDA, torch.float16) == ""


def test_there_must_be_a_gpu_of_the_right_kind_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    made = skeleton("qwen3_moe")
    assert why_not_on_device(made, CPU, torch.bfloat16) == "there is no GPU"
    assert why_not_on_device(made, CUDA, torch.float32) == "the kernels multiply 16-bit numbers, not float32"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not_on_device(made, CUDA, torch.bfloat16) == "Triton is not installed"


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("jamba", MAMBA, "it keeps recurrent state"),
        (RECURRENT_ARCHITECTURE, {"linear_key_head_dim": 24}, "it keeps recurrent state"),
        (RECURRENT_ARCHITECTURE, {"hidden_act": "gelu"}, "it keeps recurrent state"),
        (RECURRENT_ARCHITECTURE, {"number_of_conv_states": 2}, "it keeps recurrent state"),
        ("granitemoehybrid", {"time_step_limit": None}, "it keeps recurrent state"),
        (
            "granitemoehybrid",
            {"mamba_d_head": 64, "mamba_n_heads": 4, "mamba_d_state": 24},
            "it keeps recurrent state",
        ),
        ("deepseek_v32", INDEXED, "it keeps more than keys and values"),
        ("qwen3_moe", {"head_dim": 528}, "its attention heads are 528 wide"),
        ("qwen3_moe", {"head_dim": 512}, ""),
        ("mixtral", {"hidden_size": 1280, "num_attention_heads": 2}, "its attention heads are 640 wide"),
        ("deepseek_v2", {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64}, ""),
        (
            "deepseek_v2",
            {"qk_nope_head_dim": 512, "qk_rope_head_dim": 16},
            "its attention heads are 528 wide",
        ),
        ("qwen3_moe", {"moe_intermediate_size": 120}, "its experts are no multiples of 16"),
        ("gpt_oss", {"intermediate_size": 72}, "its experts are no multiples of 16"),
        ("olmoe", {"hidden_size": 136, "num_attention_heads": 2}, "its experts are no multiples of 16"),
        ("mixtral", {"hidden_act": "mish"}, "its experts' activation is not known"),
        ("mixtral", {"hidden_act": "gelu"}, ""),
    ],
)
def test_what_the_kernels_do_not_know_is_named(
    architecture: str, changes: dict[str, Any], reason: str
) -> None:
    assert why_not_in_kernels(skeleton(architecture, **changes)) == reason
    if reason and importlib.util.find_spec("triton") is not None:
        assert why_not_on_device(skeleton(architecture, **changes), CUDA, torch.bfloat16) == reason


def test_attention_in_chunks_is_named() -> None:
    made = skeleton("qwen3_moe")
    made.text_config.attention_chunk_size = 8192
    assert why_not_in_kernels(made) == "its attention is cut into chunks"


def test_experts_without_a_gate_are_known_unless_other_layers_have_one() -> None:
    made, ungated = skeleton("qwen3_moe"), skeleton(UNGATED_ARCHITECTURE)
    assert why_not_in_kernels(ungated) == why_not_in_place(ungated) == ""
    mixed = replace(made, experts=(*made.experts, *ungated.experts))
    assert (
        why_not_in_kernels(mixed) == why_not_in_place(mixed) == "its experts have a gate in some layers only"
    )
    ungated.experts[0].module.act_fn = torch.nn.SiLU()
    assert why_not_in_kernels(ungated) == why_not_in_place(ungated) == "its experts' activation is not known"


def test_experts_with_a_norm_of_their_own_are_refused() -> None:
    made = skeleton("qwen3_moe")
    made.experts[1].module.has_post_expert_norm = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="have a norm of their own"):
        _find_experts(made.model)
