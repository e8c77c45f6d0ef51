"""The known shapes are those of the published models, and nothing else."""

from __future__ import annotations

import pytest
import torch

from localmoe.core.errors import ConfigError, UnsupportedModelError
from localmoe.model import shapes
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import SHAPES, ModelShape, find_shape, shape_config
from localmoe.model.skeleton import skeleton_from_config

# published: all parameters, MoE layers, experts, experts a token, bytes of keys and values a token (16 bits)
PUBLISHED = {
    "qwen1.5-moe-a2.7b": (14.3e9, 24, 60, 4, 24 * 2 * 16 * 128 * 2),
    "deepseek-v2-lite": (15.7e9, 26, 64, 6, 27 * (512 + 64) * 2),
    "phi-3.5-moe": (41.9e9, 32, 16, 2, 32 * 2 * 8 * 128 * 2),
    "mixtral-8x7b": (46.7e9, 32, 8, 2, 32 * 2 * 8 * 128 * 2),
    "qwen3-30b-a3b": (30.5e9, 48, 128, 8, 48 * 2 * 4 * 128 * 2),
    "qwen3.5-35b-a3b": (34.7e9, 40, 256, 8, 10 * 2 * 2 * 256 * 2),
    "olmoe-1b-7b": (6.9e9, 16, 64, 8, 16 * 2 * 16 * 128 * 2),
    "gpt-oss-20b": (20.9e9, 24, 32, 4, 24 * 2 * 8 * 64 * 2),
    "gemma-4-26b-a4b": (25.2e9, 30, 128, 8, (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) * 2),
    "gpt-oss-120b": (116.8e9, 36, 128, 4, 36 * 2 * 8 * 64 * 2),
    "glm-4.7-flash": (30e9, 46, 64, 4, 47 * (512 + 64) * 2),
    "lfm2-8b-a1b": (8.3e9, 22, 32, 4, 6 * 2 * 8 * 64 * 2),
    "granite-4.0-h-small": (32.2e9, 40, 72, 10, 4 * 2 * 8 * 128 * 2),
    "nemotron-3-nano": (31.6e9, 23, 128, 6, 6 * 2 * 2 * 128 * 2),
    "kimi-linear-48b-a3b": (49.1e9, 26, 256, 8, 7 * (512 + 64) * 2),
}
IN_CODES = {
    **{f"{name}-fp8": name for name in ("qwen3-30b-a3b", "qwen3.5-35b-a3b")},
    **{f"{name}-nvfp4": name for name in ("qwen3-30b-a3b", "nemotron-3-nano")},
    **{f"{name}-int4": name for name in ("qwen3-30b-a3b", "qwen3.5-35b-a3b")},
}
LATER = {"kimi-linear-48b-a3b"}  # not every version of transformers has them
# published as "activated": for some with, for some without the two embeddings; of glm-4.7-flash no more than
# that it is some 3 B
ACTIVE = {
    "qwen1.5-moe-a2.7b": (2.7e9, True), "deepseek-v2-lite": (2.4e9, False), "phi-3.5-moe": (6.6e9, True),
    "mixtral-8x7b": (12.9e9, True), "qwen3-30b-a3b": (3.3e9, True), "olmoe-1b-7b": (1.3e9, True),
    "gpt-oss-20b": (3.6e9, False), "gpt-oss-120b": (5.1e9, False), "qwen3.5-35b-a3b": (3.0e9, False),
    "lfm2-8b-a1b": (1.5e9, True),
    "kimi-linear-48b-a3b": (3.0e9, False),
    "granite-4.0-h-small": (9e9, True), "nemotron-3-nano": (3.2e9, False), "gemma-4-26b-a4b": (3.8e9, True),
}  # fmt: skip


STATEFUL = (
    "qwen3.5-35b-a3b", "lfm2-8b-a1b", "granite-4.0-h-small", "nemotron-3-nano", "kimi-linear-48b-a3b",
)  # fmt: skip
TIED = ("lfm2-8b-a1b", "granite-4.0-h-small", "gemma-4-26b-a4b")


def test_the_shapes_are_the_known_ones() -> None:
    assert set(SHAPES) | LATER == set(PUBLISHED) | set(IN_CODES)
    assert all(shape.name == name for name, shape in SHAPES.items())


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_size(name: str) -> None:
    config = shape_config(name)
    skeleton = skeleton_from_config(config, torch.bfloat16, name)
    footprint = measure_footprint(name, torch.bfloat16, skeleton)
    packed, name = footprint.in_codes(), IN_CODES.get(name, name)
    form = footprint.name.removeprefix(name).removeprefix("-")
    params, layers, experts, top_k, kv_bytes = PUBLISHED[name]
    assert footprint.total_params == pytest.approx(params, rel=0.02)
    assert (footprint.num_layers, footprint.num_experts, footprint.experts_per_token) == (
        layers, experts, top_k
    )  # fmt: skip
    assert footprint.kv_bytes_per_token == kv_bytes
    if name in ACTIVE:
        active, with_embedding = ACTIVE[name]
        embedding = 0 if with_embedding else config.vocab_size * config.hidden_size
        close = abs(footprint.active_params - embedding - active) / active
        assert close < 0.06 or footprint.active_params - 2 * embedding == pytest.approx(active, rel=0.06)
    assert footprint.in_whole_passes().can_rollback
    assert footprint.can_rollback == (name not in STATEFUL)
    assert footprint.expert_bytes == 2 * footprint.expert_params
    if form:
        assert packed.expert_form == form
        assert (
            packed.expert_bytes < {"fp8": 1.05, "nvfp4": 0.575, "int4": 0.545}[form] * footprint.expert_params
        )
    assert all(tensor.is_meta for tensor in skeleton.model.parameters()), "no weight is made"


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_no_end_tokens_and_its_own_rotary_embeddings(name: str) -> None:
    config = shape_config(name)
    assert config.eos_token_id is None and config.pad_token_id is None
    rotary = getattr(config, "rope_parameters", None) or {}  # Nemotron 3 has none
    kinds = {name: one["rope_type"] for name, one in rotary.items() if isinstance(one, dict)}
    assert kinds == (
        {"sliding_attention": "default", "full_attention": "proportional"} if "gemma" in name else {}
    )
    own = "longrope" if name == "phi-3.5-moe" else "default"
    assert kinds or not rotary or rotary["rope_type"] == own
    assert config.tie_word_embeddings == (name in TIED)


def test_what_makes_some_shapes_special_is_there() -> None:
    phi = skeleton_from_config(shape_config("phi-3.5-moe"), torch.bfloat16, "phi")
    assert measure_footprint("phi", torch.bfloat16, phi).trained_context == 4096
    oss = shape_config("gpt-oss-20b")
    assert oss.sliding_window == 128 and oss.layer_types[:2] == ["sliding_attention", "full_attention"]
    assert len(oss.layer_types) == 24 and oss.layer_types.count("full_attention") == 12
    lite = skeleton_from_config(shape_config("deepseek-v2-lite"), torch.bfloat16, "lite")
    assert [experts.decoder_layer for experts in lite.experts] == list(range(1, 27))
    linear = shape_config("qwen3.5-35b-a3b").layer_types
    assert len(linear) == 40 and linear.count("linear_attention") == 30 and linear[3] == "full_attention"
    configs = {name: shape_config(name) for name in SHAPES if name not in IN_CODES}
    gemma = configs.pop("gemma-4-26b-a4b").rope_parameters
    assert [gemma[kind]["rope_theta"] for kind in ("sliding_attention", "full_attention")] == [1e4, 1e6]
    thetas = {
        name: config.rope_parameters["rope_theta"]
        for name, config in configs.items()
        if name not in ("nemotron-3-nano", "kimi-linear-48b-a3b")
    }
    assert thetas == {
        "qwen1.5-moe-a2.7b": 1e6, "deepseek-v2-lite": 1e4, "phi-3.5-moe": 1e4, "mixtral-8x7b": 1e6,
        "qwen3-30b-a3b": 1e6, "olmoe-1b-7b": 1e4, "gpt-oss-20b": 1.5e5, "gpt-oss-120b": 1.5e5,
        "qwen3.5-35b-a3b": 1e7, "glm-4.7-flash": 1e6,
        "lfm2-8b-a1b": 1e6, "granite-4.0-h-small": 1e4,
    }  # fmt: skip


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    for find in (find_shape, shape_config):
        with pytest.raises(ConfigError) as refusal:
            find("gpt-5")
        assert "gpt-5" in str(refusal.value) and all(name in str(refusal.value) for name in SHAPES)


def test_a_shape_that_this_transformers_does_not_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: shape for name, shape in SHAPES.items() if name not in LATER}
    monkeypatch.setattr(shapes, "SHAPES", known)
    with pytest.raises(ConfigError) as refusal:
        find_shape("kimi-linear-48b-a3b")
    assert "kimi_linear" in str(refusal.value) and "update it" in str(refusal.value)


def test_a_dense_shape_and_an_impossible_one_are_refused_by_name() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    dense = ModelShape("dense", "qwen2", {**sizes, "num_key_value_heads": 2, "intermediate_size": 64})
    with pytest.raises(UnsupportedModelError, match=r"The shape dense \(qwen2\) has no routed experts"):
        skeleton_from_config(dense.config(), torch.float32, "the shape dense")
    config = shape_config("olmoe-1b-7b")
    config.hidden_act = "nonsense"
    with pytest.raises(UnsupportedModelError, match="cannot build the shape odd"):
        skeleton_from_config(config, torch.float32, "the shape odd")
