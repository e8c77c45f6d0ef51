"""Tiny random Mixture-of-Experts models of real architectures, in memory and as folders. Run nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from support.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer

ARCHITECTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "phimoe", "olmoe", "gpt_oss")
RECURRENT_ARCHITECTURE = "qwen3_next"
CHANNEL_ARCHITECTURE, BOUNDED_ARCHITECTURE = "kimi_linear", "bailing_hybrid"
# whose recurrent state the GPU's kernels know: by the delta rule, with projections in two orders, or with
# decays by channel, or these bounded, a state space, a short convolution; not every version of transformers
# has all
STATEFUL_ARCHITECTURES = (
    RECURRENT_ARCHITECTURE, "qwen3_5_moe_text", "granitemoehybrid", "hybrid nemotron_h", "lfm2_moe",
    *(name for name in (CHANNEL_ARCHITECTURE, BOUNDED_ARCHITECTURE) if name in CONFIG_MAPPING_NAMES),
)  # fmt: skip
UNGATED_ARCHITECTURE = "nemotron_h"  # by default without the layers that keep a state
UNGATED_RECURRENT = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"]
}
CONTEXT = 512
SLIDING_WINDOW = 16  # of gpt_oss, shorter than any test's text
_WEIGHT_SCALE = 0.08  # large enough for answers that vary


def tiny_config(architecture: str, **changes: Any) -> Any:
    """A transformers config: 3 layers (4 if recurrent), 8 experts, 128 wide."""
    common = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0, "num_experts_per_tok": 3,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(
        architecture.split()[-1], **{**common, **_special(architecture), **changes}
    )


def _special(architecture: str) -> dict[str, Any]:
    shared_expert = {"shared_expert_intermediate_size": 128, "intermediate_size": 256}
    match architecture:
        case "qwen2_moe":
            return {
                "num_experts": 8,
                "moe_intermediate_size": 128,
                "use_sliding_window": False,
                **shared_expert,
            }
        case "qwen3_moe":
            sizes = {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 256}
            return {"head_dim": 32, "norm_topk_prob": True, **sizes}
        case "mixtral":
            return {
                "num_local_experts": 8,
                "intermediate_size": 128,
                "sliding_window": None,
                "num_experts_per_tok": 2,
            }
        case "deepseek_v2":
            heads = {
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 16,
                "v_head_dim": 32,
                "num_key_value_heads": 4,
            }
            latent = {"kv_lora_rank": 64, "q_lora_rank": None}
            experts = {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 128}
            routing = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
            return {
                **heads,
                **latent,
                **experts,
                **routing,
                "intermediate_size": 256,
                "first_k_dense_replace": 1,
            }
        case "glm4_moe_lite":
            heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
            latent = {"kv_lora_rank": 64, "q_lora_rank": None, "num_key_value_heads": 4}
            sizes = {"n_routed_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}
            routing = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
            return {**heads, **latent, **sizes, **routing}
        case "phimoe":
            biased = {"attention_bias": True, "lm_head_bias": True, "sliding_window": None}
            return {"num_local_experts": 8, "intermediate_size": 128, "num_experts_per_tok": 2, **biased}
        case "olmoe":
            return {"num_experts": 8, "intermediate_size": 128}
        case "gpt_oss":
            layers = ["sliding_attention", "full_attention", "sliding_attention"]
            sizes = {"num_local_experts": 8, "intermediate_size": 128, "head_dim": 32}
            return {**sizes, "sliding_window": SLIDING_WINDOW, "layer_types": layers}
        case "qwen3_next" | "qwen3_5_moe_text":
            linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
            dims = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32}
            sizes = {"num_experts": 8, "moe_intermediate_size": 128, "num_hidden_layers": 4}
            return {**linear, **dims, **sizes, **shared_expert}
        case "kimi_linear":
            linear = {"linear_num_heads": 4, "linear_head_dim": 32, "num_key_value_heads": 4}
            latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
            sizes = {"num_local_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}
            kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
            return {**linear, **latent, **sizes, **kinds, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        case "bailing_hybrid":
            linear = {"head_dim": 32, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
            latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
            sizes = {"num_local_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}
            kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
            return {**linear, **latent, **sizes, **kinds, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        case "granitemoehybrid":
            heads = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
            sizes = {"num_local_experts": 8, "intermediate_size": 128, "shared_intermediate_size": 128}
            kinds = {"layer_types": ["mamba", "full_attention", "mamba"]}
            return {**heads, **sizes, **kinds, "mamba_expand": 2, "mamba_chunk_size": 16}
        case "lfm2_moe":
            sizes = {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}
            return {**sizes, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        case "nemotron_h" | "hybrid nemotron_h":
            mamba = {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16}
            sizes = {"n_routed_experts": 8, "moe_intermediate_size": 192, "intermediate_size": 128}
            shared = {"moe_shared_expert_intermediate_size": 64, "head_dim": 32, "chunk_size": 16}
            kinds = UNGATED_RECURRENT if architecture.startswith("hybrid") else {}
            usual = {"layers_block_type": ["full_attention", "moe"] * 3}
            return {**mamba, **sizes, **shared, **usual, **kinds}
    return {}  # the caller says what is special


def tiny_model(
    architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """transformers' own model with random weights, biases and attention sinks. Special tokens have logit 0,
    so that greedy answers are plain text, which gives the same tokens when it is read again."""
    config = tiny_config(architecture, **changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return randomised(model, dtype)


def randomised(model: Any, dtype: torch.dtype) -> Any:
    """The model with random weights, biases and attention sinks, and logit 0 of special tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "bias" in name or "sinks" in name:
                parameter.normal_(0.0, _WEIGHT_SCALE)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # gemma4's, which a checkpoint holds as it does weights
                buffer.uniform_(0.4, 0.9)
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, _WEIGHT_SCALE)
            elif name.endswith("tid2eid"):  # deepseek_v4's experts of each token
                buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) % 8)
        head = model.get_output_embeddings()
        for parameter in head.parameters():
            parameter[: len(SPECIAL_TOKENS)] = 0.0
    return model.to(dtype)


def write_model(folder: Path, model: Any, **save_options: Any) -> Path:
    """A complete model folder: config, weights, tokenizer with a chat template."""
    model.save_pretrained(folder, **save_options)
    write_tokenizer(folder)
    return folder


def tied_model_storing(folder: Path, stored: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model that its config calls tied, with tensors that say otherwise, or twice the same."""
    folder = write_model(folder, tiny_model("qwen2_moe", dtype=dtype, tie_word_embeddings=True))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    if stored == "two values":
        tensors["lm_head.weight"] = table.roll(1, 0)
    elif stored == "one value twice":
        tensors["lm_head.weight"] = table.clone()
    else:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def reference_greedy(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """The tokens that transformers' own greedy `generate` adds to a prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, **options
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
