"""Tiny models with a layer that predicts one token more, as their checkpoints have it. Run nothing."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import tiny_model, write_model

# in checkpoints behind the last layer, or under a name of its own
BEHIND, BESIDE = ("glm4_moe", "deepseek_v3", "glm4_moe_lite"), ("qwen3_next", "qwen3_5_moe_text")
_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": {**_EXPERTS, **_GROUPS, "head_dim": 32},
    "deepseek_v3": {**_EXPERTS, **_GROUPS, **_LATENT},
}
_ADDED = re.compile(r"(o_proj|out_proj|down_proj|shared_experts?\.down_proj)(\.weight)?$")  # to the residual


def mtp_model(
    folder: Path,
    architecture: str,
    *,
    dtype: torch.dtype = torch.float32,
    agrees: bool = False,
    **changes: Any,
) -> Path:
    """A model folder whose files have such a layer.

    Args:
        agrees: what follows a token is told by that token alone, and the layer tells the same.
    """
    changes = {**CHANGES.get(architecture, {}), **changes}
    model = tiny_model(architecture, dtype=dtype, **changes)
    donor = tiny_model(architecture, seed=7, dtype=dtype, **changes)
    if agrees:
        _leave_the_residual_alone(model)
        _leave_the_residual_alone(donor)
    return add_mtp_layer(write_model(folder, model), donor, architecture, agrees=agrees)


def add_mtp_layer(folder: Path, donor: Any, architecture: str, *, agrees: bool = False) -> Path:
    """A model folder with such a layer beside what it has. donor: a text model of the same dimensions."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= _mtp_tensors(donor, architecture, "model.norm.weight", agrees)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"}
    )
    return folder


@torch.no_grad()
def _leave_the_residual_alone(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if _ADDED.search(name):
            parameter.zero_()


def _mtp_tensors(donor: Any, architecture: str, norm: str, agrees: bool) -> dict[str, Tensor]:
    """The donor's last layer, which has experts and attends to tokens, and what is around it."""
    with TemporaryDirectory() as folder:
        donor.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    layers, hidden = int(donor.config.num_hidden_layers), int(donor.config.hidden_size)
    last = f"model.layers.{layers - 1}."
    generator = torch.Generator().manual_seed(9)
    joined = torch.randn(hidden, 2 * hidden, generator=generator) * 0.08
    if agrees:
        joined = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    norms = [1 + 0.3 * torch.rand(hidden, generator=generator) for _ in range(3)]
    if architecture in BESIDE:  # whose norms add one
        norms = [norm - 1 for norm in norms]
    enorm, hnorm, behind = (stored[norm].clone() if agrees else new.to(stored[norm].dtype) for new in norms)
    joined = joined.to(stored[norm].dtype)
    block = {name.removeprefix(last): tensor for name, tensor in stored.items() if name.startswith(last)}
    if architecture in BESIDE:
        around = {
            "fc.weight": joined, "pre_fc_norm_embedding.weight": enorm, "pre_fc_norm_hidden.weight": hnorm,
            "norm.weight": behind,
        }  # fmt: skip
        return {f"mtp.{name}": tensor for name, tensor in around.items()} | {
            f"mtp.layers.0.{name}": tensor for name, tensor in block.items()
        }
    embedding = stored["model.embed_tokens.weight"]
    head = stored.get("lm_head.weight", embedding).clone()
    around = {
        "eh_proj.weight": joined, "enorm.weight": enorm, "hnorm.weight": hnorm,
        "shared_head.norm.weight": behind, "shared_head.head.weight": head,
        "embed_tokens.weight": embedding,
    }  # fmt: skip
    return {f"model.layers.{layers}.{name}": tensor for name, tensor in (block | around).items()}
