"""Shapes of well-known models, made in code: what a benchmark with random weights needs instead of a file.
Loads nothing.

Dimensions are those of the published config.json files, and weights are 16-bit ones, in MXFP4, FP8, NVFP4 or
INT4.
Rotary embeddings have no long-context scaling (published: deepseek-v2-lite and gpt-oss yarn, phi-3.5-moe
longrope), which changes the angles and not the cost; `max_position_embeddings` stays as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from localmoe.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A name, and what makes a transformers config: its model_type and dimensions. has_mtp: it is published
    with a layer that predicts one token more."""

    name: str
    architecture: str
    dimensions: Mapping[str, Any]
    has_mtp: bool = False

    def config(self) -> Any:
        """A new transformers config, without end tokens."""
        no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return transformers.AutoConfig.for_model(self.architecture, **{**no_tokens, **self.dimensions})


def find_shape(name: str) -> ModelShape:
    """The shape of that name.

    Raises:
        ConfigError: there is none; names those that there are.
    """
    later = next((shape for shape in _ALL if shape.name == name and name not in SHAPES), None)
    if later is not None:
        raise ConfigError(
            f"Shape '{name}' needs a transformers that knows {later.architecture}, which version "
            f"{transformers.__version__} does not: update it, or use one of {', '.join(SHAPES)}."
        )
    if name not in SHAPES:
        raise ConfigError(f"Shape '{name}' is unknown: use one of {', '.join(SHAPES)}.")
    return SHAPES[name]


def shape_config(name: str) -> Any:
    """The transformers config of a shape.

    Raises:
        ConfigError: there is no such shape.
    """
    return find_shape(name).config()


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _long_rope(theta: float, trained: int, pairs: int) -> dict[str, Any]:
    """Angles that depend on the text's length, with factors that leave them as they are."""
    factors = {"short_factor": [1.0] * pairs, "long_factor": [1.0] * pairs}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": trained, "rope_theta": theta}
    return {"rope_parameters": {**scaling, **factors, "short_mscale": 1.243, "long_mscale": 1.243}}


def _gpt_oss(name: str, *, layers: int, experts: int) -> ModelShape:
    return ModelShape(
        name,
        "gpt_oss",
        {
            "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": layers, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": experts,
            "num_experts_per_tok": 4, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            **_rope(150000.0), "quantization_config": {"quant_method": "mxfp4"},
        },
    )  # fmt: skip


# layers of Nemotron 3 Nano, each one thing alone
_BLOCKS = MappingProxyType({"M": "linear_attention", "E": "moe", "*": "full_attention"})
_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_ALL = (
    ModelShape(  # Qwen/Qwen1.5-MoE-A2.7B: 14.3 B
        "qwen1.5-moe-a2.7b",
        "qwen2_moe",
        {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "use_sliding_window": False,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            **_rope(1e6),
        },
    ),
    ModelShape(  # deepseek-ai/DeepSeek-V2-Lite: 15.7 B
        "deepseek-v2-lite",
        "deepseek_v2",
        {
            "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "greedy", "n_group": 1,
            "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            **_rope(1e4),
        },
    ),
    ModelShape(  # microsoft/Phi-3.5-MoE-instruct: 41.9 B
        "phi-3.5-moe",
        "phimoe",
        {
            "vocab_size": 32064, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 6400, "num_local_experts": 16,
            "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
            "sliding_window": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, **_long_rope(1e4, 4096, 64),
        },
    ),
    ModelShape(  # mistralai/Mixtral-8x7B-v0.1: 46.7 B
        "mixtral-8x7b",
        "mixtral",
        {
            "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
            "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **_rope(1e6),
        },
    ),
    ModelShape(  # Qwen/Qwen3-30B-A3B: 30.5 B
        "qwen3-30b-a3b",
        "qwen3_moe",
        {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            **_rope(1e6),
        },
    ),
    ModelShape(  # the text part of Qwen/Qwen3.5-35B-A3B and Qwen/Qwen3.6-35B-A3B: 34.7 B
        "qwen3.5-35b-a3b",
        "qwen3_5_moe_text",
        {
            "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": True,
            },
        },
        has_mtp=True,
    ),
    ModelShape(  # the text part of google/gemma-4-26B-A4B: 25.2 B
        "gemma-4-26b-a4b",
        "gemma4_text",
        {
            "vocab_size": 262144, "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
            "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256,
            "global_head_dim": 512, "attention_k_eq_v": True, "intermediate_size": 2112,
            "enable_moe_block": True, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8,
            "hidden_size_per_layer_input": 0, "sliding_window": 1024, "final_logit_softcapping": 30.0,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        },
    ),
    ModelShape(  # LiquidAI/LFM2-8B-A1B: 8.3 B
        "lfm2-8b-a1b",
        "lfm2_moe",
        {
            "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 7168, "moe_intermediate_size": 1792,
            "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True,
            "use_expert_bias": True, "routed_scaling_factor": 1.0, "conv_bias": False, "conv_L_cache": 3,
            "layer_types": [
                "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
            ],
            "max_position_embeddings": 128000, "norm_eps": 1e-5, "tie_word_embeddings": True, **_rope(1e6),
        },
    ),
    ModelShape(  # ibm-granite/granite-4.0-h-small: 32.2 B
        "granite-4.0-h-small",
        "granitemoehybrid",
        {
            "vocab_size": 100352, "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 768, "shared_intermediate_size": 1536,
            "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64,
            "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
            "layer_types": [
                "full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)
            ],
            "position_embedding_type": "nope", "embedding_multiplier": 12, "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22, "logits_scaling": 16, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **_rope(1e4),
        },
    ),
    ModelShape(  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16: 31.6 B
        "nemotron-3-nano",
        "nemotron_h",
        {
            "vocab_size": 131072, "hidden_size": 2688, "num_hidden_layers": 52,
            "layers_block_type": [_BLOCKS[kind] for kind in _NEMOTRON], "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "mamba_num_heads": 64,
            "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2,
            "chunk_size": 128, "use_conv_bias": True, "max_position_embeddings": 262144,
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
        },
    ),
    ModelShape(  # allenai/OLMoE-1B-7B-0924: 6.9 B
        "olmoe-1b-7b",
        "olmoe",
        {
            "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64,
            "num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **_rope(1e4),
        },
    ),
    _gpt_oss("gpt-oss-20b", layers=24, experts=32),  # openai/gpt-oss-20b: 20.9 B
    _gpt_oss("gpt-oss-120b", layers=36, experts=128),  # openai/gpt-oss-120b: 116.8 B
    ModelShape(  # zai-org/GLM-4.7-Flash: 29.9 B, without its MTP layer
        "glm-4.7-flash",
        "glm4_moe_lite",
        {
            "vocab_size": 154880, "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
            "num_key_value_heads": 20, "intermediate_size": 10240, "moe_intermediate_size": 1536,
            "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "q_lora_rank": 768,
            "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            **_rope(1e6),
        },
        has_mtp=True,
    ),
    ModelShape(  # moonshotai/Kimi-Linear-48B-A3B-Instruct: 49.1 B
        "kimi-linear-48b-a3b",
        "kimi_linear",
        {
            "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
            "num_key_value_heads": 32, "intermediate_size": 9216, "moe_intermediate_size": 1024,
            "num_local_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446,
            "mlp_layer_types": ["dense", *["sparse"] * 26], "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "layer_types": [
                "full_attention" if layer in (4, 8, 12, 16, 20, 24, 27) else "linear_attention"
                for layer in range(1, 28)
            ],
            "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
    ),
)  # fmt: skip
_CODED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fp8": (  # Qwen/Qwen3-30B-A3B-FP8, Qwen/Qwen3.5-35B-A3B-FP8
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        ("qwen3-30b-a3b", "qwen3.5-35b-a3b"),
    ),
    "nvfp4": (  # nvidia/Qwen3-30B-A3B-NVFP4, nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("qwen3-30b-a3b", "nemotron-3-nano"),
    ),
    "int4": (  # Qwen/Qwen3-30B-A3B-GPTQ-Int4, Qwen/Qwen3.5-35B-A3B-GPTQ-Int4
        {"quant_method": "gptq", "bits": 4, "group_size": 128}, ("qwen3-30b-a3b", "qwen3.5-35b-a3b"),
    ),
}  # fmt: skip
_IN_CODES = tuple(
    replace(shape, name=f"{shape.name}-{form}", dimensions={**shape.dimensions, "quantization_config": how})
    for form, (how, names) in _CODED.items()
    for shape in _ALL
    if shape.name in names
)
# those that this version of transformers knows
SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {shape.name: shape for shape in _ALL + _IN_CODES if shape.architecture in CONFIG_MAPPING_NAMES}
)
