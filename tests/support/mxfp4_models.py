"""Folders of models whose experts are stored in MXFP4, as gpt-oss is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import write_model

_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 (..., N, K / 32, 16) and (..., N, K / 32) nearest to weights (..., N, K)."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponent = largest.log2().floor() - 2
    scaled = blocks / exponent.exp2()
    codes = (scaled.abs()[..., None] - _VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent[..., 0] + 127).to(torch.uint8)


def write_mxfp4_model(folder: Path, model: Any) -> Path:
    """A complete folder of a gpt_oss model, its experts rounded to MXFP4 and stored so."""
    write_model(folder, model)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = to_mxfp4(tensors.pop(name).transpose(1, 2))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    save_file(tensors, path, {"format": "pt"})
    say_mxfp4(folder)
    return folder


def say_mxfp4(folder: Path) -> None:
    """In a model's config.json, as published ones do."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
