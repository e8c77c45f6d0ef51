"""The demo model itself: its shape, its experts in training, its balance loss, and how it is saved.

Knows nothing of data or of the training loop.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

BALANCE_WEIGHT = 0.01
DROPOUT = 0.05  # on every sublayer's output: the corpus is read several times
END_OF_TEXT, IM_END = 0, 2


def model_config() -> Qwen2MoeConfig:
    """12.3 million parameters, 24.6 MB in bf16; 9.4 million are routed experts (INT4 draft: 5.0 MB)."""
    return Qwen2MoeConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        router_aux_loss_coef=BALANCE_WEIGHT,
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )


def dense_train(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts as one wide MLP, masked by the routing weights: two large products instead of E small ones.

    (tokens, hidden) -> (tokens, hidden). For few experts only: it computes E/K times what routing needs.
    """
    num_experts, double, hidden = self.gate_up_proj.shape
    gate_up = F.linear(hidden_states, self.gate_up_proj.reshape(num_experts * double, hidden))
    inner = self._apply_gate(gate_up.view(-1, num_experts, double))  # (tokens, experts, intermediate)
    weights = top_k_weights.new_zeros(hidden_states.shape[0], num_experts).scatter(
        1, top_k_index, top_k_weights
    )
    inner = inner * weights[:, :, None].to(inner.dtype)
    down = self.down_proj.permute(0, 2, 1).reshape(num_experts * double // 2, hidden)
    return (inner.flatten(1) @ down).to(hidden_states.dtype)


def build_model(seed: int, device: str) -> Qwen2MoeForCausalLM:
    """A fresh float32 model that trains with `dense_train`."""
    torch.manual_seed(seed)
    ALL_EXPERTS_FUNCTIONS.register("dense_train", dense_train)
    model = Qwen2MoeForCausalLM(model_config())
    model.set_experts_implementation("dense_train")
    return model.to(device)


class RouterTap:
    """Collects the router logits of one forward pass and adds dropout behind every sublayer."""

    def __init__(self, model: Qwen2MoeForCausalLM) -> None:
        self.logits: list[Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._keep)
            layer.mlp.register_forward_hook(self._drop)
            layer.self_attn.register_forward_hook(self._drop)

    def _keep(self, module: nn.Module, args: object, output: tuple[Tensor, ...]) -> None:
        self.logits.append(output[0])

    def _drop(
        self, module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return (F.dropout(output[0], DROPOUT, module.training), *output[1:])
        return F.dropout(output, DROPOUT, module.training)

    def balance_loss(self, top_k: int) -> Tensor:
        """Mean over layers of E x sum(load share x mean probability): 1 where routing is even."""
        losses = []
        for logits in self.logits:
            probs = logits.float().softmax(-1)
            num_experts = probs.shape[-1]
            chosen = torch.zeros_like(probs).scatter(1, probs.topk(top_k, -1).indices, 1.0)
            losses.append(num_experts * (chosen.mean(0) / top_k * probs.mean(0)).sum())
        return torch.stack(losses).mean()


def save(model: Qwen2MoeForCausalLM, out: Path, pieces: int) -> None:
    """bf16 weights and configuration; pieces > 1 cuts the weights into model.safetensors.0, .1, ..."""
    out.mkdir(parents=True, exist_ok=True)
    model.set_experts_implementation("eager")
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[IM_END, END_OF_TEXT],
        pad_token_id=END_OF_TEXT,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    model.save_pretrained(out)
    if pieces > 1:
        weights = out / "model.safetensors"
        content = weights.read_bytes()
        step = -(-len(content) // pieces)
        for i in range(pieces):
            (out / f"model.safetensors.{i}").write_bytes(content[i * step : (i + 1) * step])
        weights.unlink()
