"""Folders of models whose matrices are stored as integers of four bits, as GPTQ, AWQ, AutoRound and others
publish them, and the same models in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.float8_models import KEPT
from support.tiny_models import write_model

By = Literal["gptq", "gptq_v2", "awq", "auto-round", "compressed-tensors"]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is the weight of column order[i]


def said_of(published: By, group: int, *, symmetric: bool, ordered: bool = False) -> dict[str, Any]:
    """As `quantization_config` has it. ordered: columns are in groups by their activations."""
    size = group or -1
    if published == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    if published == "auto-round":
        return {
            "quant_method": "auto-round", "bits": 4, "group_size": size, "sym": symmetric,
            "data_type": "int", "packing_format": "auto_round:auto_gptq",
        }  # fmt: skip
    if published == "compressed-tensors":
        weights = {
            "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
            "group_size": group or None, "actorder": "group" if ordered else None,
        }  # fmt: skip
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
        }  # fmt: skip
    return {
        "quant_method": "gptq", "bits": 4, "group_size": size, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": published,
    }  # fmt: skip


def packed(codes: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 (N, K / 8) of (N, K) numbers below 16, one after another by the definition."""
    rows, columns = codes.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for i, place in enumerate(places):
        words |= codes[:, place::8].long() << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def to_int4(
    base: str, weight: Tensor, published: By, group: int, *, symmetric: bool, ordered: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors as they are published, and float32 (N, K) of what these are."""
    rows, columns = weight.shape
    group = group or columns
    groups = -(-columns // group)
    places = torch.arange(columns) // group
    if ordered:
        places = places[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    dtype = torch.bfloat16 if published == "compressed-tensors" else torch.float16
    codes, each, zeros = (torch.zeros(rows, columns) for _ in range(3))
    scales, points = torch.zeros(rows, groups, dtype=dtype), torch.full((rows, groups), 8)
    for g in range(groups):
        of_group = places == g
        some = weight[:, of_group].float()
        low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
        if symmetric:
            scale = (some.abs().amax(1) / 7).to(dtype)
        else:
            scale = ((high - low) / 15).to(dtype)
            points[:, g] = (-low / scale.float()).round().clamp(0, 15).int()
        scales[:, g] = scale
        each[:, of_group], zeros[:, of_group] = scale.float()[:, None], points[:, g, None].float()
        numbers = some / scale.float()[:, None] + points[:, g, None]
        codes[:, of_group] = numbers.round().clamp(0, 15)
    exact, codes = (codes - zeros) * each, codes.int()
    if published == "compressed-tensors":
        tensors = {
            f"{base}weight_packed": packed(codes), f"{base}weight_scale": scales,
            f"{base}weight_shape": torch.tensor([rows, columns]),
        }  # fmt: skip
        if not symmetric:
            tensors[f"{base}weight_zero_point"] = packed(points.T).T.contiguous()
        if ordered:
            tensors[f"{base}weight_g_idx"] = places.int()
        return tensors, exact
    order = _AWQ_ORDER if published == "awq" else tuple(range(8))
    less = 0 if published in ("awq", "gptq_v2") else 1
    by_word = packed(codes.T, order) if published == "awq" else packed(codes).T.contiguous()
    tensors = {
        f"{base}qweight": by_word,
        f"{base}qzeros": packed(points.T, order) - less * 0x11111111,  # as GPTQModel does, of whole words
        f"{base}scales": scales.T.contiguous(),
    }
    if published != "awq":
        tensors[f"{base}g_idx"] = places.int()
    if published == "gptq":
        tensors[f"{base}bias"] = torch.zeros(rows, dtype=torch.float16)  # as older versions wrote for all
    return tensors, exact


def write_int4_model(
    folder: Path, model: Any, *, published: By = "gptq", group: int = 128, symmetric: bool = True,
    ordered: bool = False,
) -> tuple[Path, Path]:  # fmt: skip
    """A complete folder of a model in INT4, and one of what it is in 16 bits. group: columns that share a
    scale; 0: all of a row."""
    four, sixteen = write_model(folder / "four", model), write_model(folder / "sixteen", model)
    tensors = load_file(four / "model.safetensors")
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        fits = weight.ndim == 2 and not weight.shape[0] % 8 and not weight.shape[1] % 8
        if not fits or KEPT.search(name) or not name.endswith("weight"):
            plain[name] = tensors[name] = weight.to(torch.bfloat16)
            continue
        del tensors[name]
        stored, exact = to_int4(
            name.removesuffix("weight"), weight, published, group, symmetric=symmetric, ordered=ordered
        )
        bias = f"{name.removesuffix('weight')}bias"
        tensors |= {key: value for key, value in stored.items() if key != bias or bias not in plain}
        plain[name] = exact.to(torch.bfloat16)
    save_file(tensors, four / "model.safetensors", {"format": "pt"})
    save_file(plain, sixteen / "model.safetensors", {"format": "pt"})
    path = four / "config.json"
    said = said_of(published, group, symmetric=symmetric, ordered=ordered)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    return four, sixteen
