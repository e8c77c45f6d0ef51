"""Folders of models whose matrices are stored as eight-bit floats with scales, as FP8 versions are published,
and the same models in 16 bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import write_model

_LARGEST = 448.0
KEPT = re.compile(r"embed_tokens|lm_head|norm|mlp\.gate\.|router|shared_expert_gate")
By = Literal["block", "channel", "tensor"]
BLOCK = (32, 48)  # which divides few sizes
KEPT_BLOCK = (32, 128)  # of which records can be made as they are


def to_float8(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """E4M3 of weights (..., N, K), and scales (..., N / rows, K / columns), rounded up, of this dtype."""
    rows, columns = weight.shape[-2:]
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(*weight.shape[:-2], down * block[0], across * block[1])
    padded[..., :rows, :columns] = weight.float()
    largest = padded.unflatten(-1, (across, block[1])).unflatten(-3, (down, block[0])).abs().amax((-3, -1))
    scales = (largest / _LARGEST).clamp(min=1e-8).to(dtype)
    codes = (weight.float() / spread(scales.float(), block, (rows, columns))).clamp(-_LARGEST, _LARGEST)
    return codes.to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """A scale for each weight."""
    each = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return each[..., : shape[0], : shape[1]]


def write_float8_model(
    folder: Path, model: Any, *, by: By = "block", dtype: torch.dtype = torch.float32, published: str = "fp8",
    block: tuple[int, int] = BLOCK,
) -> tuple[Path, Path]:  # fmt: skip
    """A complete folder of a model in FP8, and one of what it is in 16 bits. published: "fp8" or
    "compressed-tensors", by which names and config go."""
    eight, sixteen = write_model(folder / "eight", model), write_model(folder / "sixteen", model)
    tensors = load_file(eight / "model.safetensors")
    plain = dict(tensors)
    suffix = "_scale_inv" if published == "fp8" else "_scale"
    for name, weight in list(tensors.items()):
        if weight.ndim < 2 or KEPT.search(name):
            plain[name] = tensors[name] = weight.to(torch.bfloat16)
            continue
        shape = (weight.shape[-2], weight.shape[-1])
        size = {"block": block, "channel": (1, shape[1]), "tensor": shape}[by]
        codes, scales = to_float8(weight, size, dtype)
        each = spread(scales.float().double(), size, shape)
        tensors[name] = codes
        tensors[name + suffix] = scales.view(weight.shape[:-2]) if by == "tensor" else scales
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        plain[name] = (codes.double() * each).float().to(torch.bfloat16)
    save_file(tensors, eight / "model.safetensors", {"format": "pt"})
    save_file(plain, sixteen / "model.safetensors", {"format": "pt"})
    say_float8(eight, block if by == "block" else None, published)
    return eight, sixteen


def say_float8(folder: Path, block: tuple[int, int] | None = BLOCK, published: str = "fp8") -> None:
    """In a model's config.json, as published ones do."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "block_structure": block}
    said: dict[str, Any] = {
        "fp8": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block,
        },
        "compressed-tensors": {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    }  # fmt: skip
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = said[published]
    path.write_text(json.dumps(config))
