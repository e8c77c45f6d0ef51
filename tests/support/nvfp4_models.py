"""Folders of models whose matrices are stored in NVFP4, some in FP8, as NVIDIA and others publish them, and
the same models in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.float8_models import KEPT, spread, to_float8
from support.tiny_models import write_model

_LARGEST, _GROUP = 6.0, 16
_EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between magnitudes of E2M1
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
By = Literal["modelopt", "compressed-tensors"]
_SAID: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "mixed": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "experts": {"quant_algo": "NVFP4", "group_size": 16}, "attention": {"quant_algo": "FP8"},
        },
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    },
}  # fmt: skip


def to_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """uint8 (.., K / 2), two codes a byte, E4M3 (.., K / 16), and the tensor's scale."""
    groups = weight.float().unflatten(-1, (-1, _GROUP))
    factor = float(groups.abs().amax()) / _LARGEST / 448
    scales = (groups.abs().amax(-1) / _LARGEST / factor).to(torch.float8_e4m3fn)
    numbers = groups / (scales.float() * factor).clamp(min=1e-30).unsqueeze(-1)
    codes = torch.bucketize(numbers.abs(), _EDGES) + 8 * (numbers < 0)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, scales, factor


def from_nvfp4(codes: Tensor, scales: Tensor, factor: float) -> Tensor:
    """float64, what they are."""
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    numbers = _MAGNITUDES.double()[both & 7] * (1 - 2 * (both >> 3))
    return numbers * scales.double().repeat_interleave(_GROUP, -1) * factor


def write_nvfp4_model(
    folder: Path, model: Any, *, published: By = "modelopt", eights: bool = False
) -> tuple[Path, Path]:
    """A complete folder of a model in NVFP4, and one of what it is in 16 bits. eights: attention is
    in FP8."""
    four, sixteen = write_model(folder / "four", model), write_model(folder / "sixteen", model)
    tensors = load_file(four / "model.safetensors")
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        if weight.ndim < 2 or KEPT.search(name) or weight.shape[-1] % _GROUP:
            plain[name] = tensors[name] = weight.to(torch.bfloat16)
            continue
        del tensors[name]
        if eights and "attn" in name:
            shape = (weight.shape[-2], weight.shape[-1])
            eight, scales = to_float8(weight, shape, torch.float32)
            tensors[name], tensors[f"{name}_scale"] = eight, scales.view(())
            each = spread(scales.double(), shape, shape)
            plain[name] = (eight.double() * each).float().to(torch.bfloat16)
            continue
        codes, scales, factor = to_nvfp4(weight)
        tensors[f"{name}_packed" if published != "modelopt" else name] = codes
        tensors[f"{name}_scale"] = scales
        base = name.removesuffix("weight")
        if published == "modelopt":
            tensors[f"{name}_scale_2"] = torch.tensor(factor)
            tensors[f"{base}input_scale"] = torch.ones(())
            if base.endswith("k_proj."):
                tensors[f"{base}k_scale"] = torch.ones(())
            each_scale = scales.float() * factor
        else:
            tensors[f"{name}_global_scale"] = torch.tensor([1 / factor])
            tensors[f"{base}input_global_scale"] = torch.ones(1)
            each_scale = scales.float() / torch.tensor([1 / factor])
        unscaled = from_nvfp4(codes, torch.ones_like(scales, dtype=torch.float32), 1.0).float()
        plain[name] = (unscaled * each_scale.repeat_interleave(_GROUP, -1)).to(torch.bfloat16)
    save_file(tensors, four / "model.safetensors", {"format": "pt"})
    save_file(plain, sixteen / "model.safetensors", {"format": "pt"})
    say_nvfp4(four, "mixed" if eights else published)
    return four, sixteen


def say_nvfp4(folder: Path, how: str) -> None:
    """In a model's config.json, as published ones do."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = _SAID[how]
    path.write_text(json.dumps(config))
