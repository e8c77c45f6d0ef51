"""Checkpoints of any size as files with holes: all weights are zero and take no disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

ROUTED = ("gate_proj", "up_proj", "down_proj")


def tensor_shapes(config: Any, *, fused: bool) -> dict[str, list[int]]:
    """Names and shapes of a model's weights, the experts fused or one by one as Qwen names them."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if fused or not path.endswith(".experts"):
            shapes[name] = list(parameter.shape)
            continue
        experts, rows, columns = parameter.shape
        parts = ROUTED[:2] if leaf == "gate_up_proj" else ROUTED[2:]
        for expert in range(experts):
            shapes |= {f"{path}.{expert}.{part}.weight": [rows // len(parts), columns] for part in parts}
    return shapes


def write_zeros(path: Path, shapes: dict[str, list[int]]) -> None:
    """One bfloat16 safetensors file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(file.tell() + end)
