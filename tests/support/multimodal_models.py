"""Tiny random models for text and pictures whose text part is a Mixture of Experts, and a dense one that can
draft for them. Run nothing."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from support.tiny_models import randomised, tiny_config

_QWEN_EYES = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_EYES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "n_routed_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}


def mrope(sections: list[int], share: float = 1.0) -> dict[str, Any]:
    """Rotation by three positions: of time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    return {"rope_parameters": {**rope, "partial_rotary_factor": share}}


# architecture: that of its text part and what is special there, and of its vision part
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl_moe": (  # its experts' matrices are published the other way round
        "qwen3_vl_moe_text", {**_EXPERTS, "head_dim": 32, **mrope([6, 5, 5])}, _QWEN_EYES,
    ),
    "glm4v_moe": (
        "glm4v_moe_text",
        {
            **_EXPERTS, "head_dim": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "n_shared_experts": 1, **mrope([2, 3, 3], 0.5),
        },
        {name: value for name, value in _QWEN_EYES.items() if name != "deepstack_visual_indexes"},
    ),
    "mistral3": ("mistral4", {**_EXPERTS, **_LATENT}, {"model_type": "pixtral", **_EYES}),
    "internvl": (
        "qwen3_moe", {**_EXPERTS, "head_dim": 32}, {**_EYES, "image_size": [28, 28], "patch_size": [14, 14]}
    ),
    "gemma4": (
        "gemma4_text",
        {
            **_EXPERTS, "sliding_window": 16, "enable_moe_block": True, "top_k_experts": 3, "head_dim": 32,
            "global_head_dim": 64, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        {**_EYES, "head_dim": 32, "num_key_value_heads": 2},
    ),
}  # fmt: skip
_DENSE_TEXT = {"intermediate_size": 128, "head_dim": 32, **mrope([6, 5, 5])}  # of qwen3_vl


def multimodal_model(architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model with random weights, all its parts."""
    dense = "qwen3_vl_text", _DENSE_TEXT, _QWEN_EYES
    kind, special, eyes = MULTIMODAL.get(architecture, dense)
    text = tiny_config(kind, **special).to_dict()
    config = transformers.AutoConfig.for_model(architecture, text_config=text, vision_config=eyes)
    torch.manual_seed(seed)
    return randomised(transformers.AutoModelForImageTextToText.from_config(config).eval(), dtype)
