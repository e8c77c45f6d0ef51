"""What all ways to fill a skeleton share: which weights stay float32, and the buffers that no file holds.
Reads and makes no weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def float32_names(model: Any) -> re.Pattern[str] | None:
    """Found in the names of the weights that the architecture keeps in float32; None if there are none."""
    plan = model._get_dtype_plan(model.dtype)
    names = [name for name, kept in plan.items() if kept == torch.float32]
    return re.compile("|".join(re.escape(name) for name in names)) if names else None


def rebuild_buffers(model: Any, device: torch.device) -> None:
    """Make the buffers that are still without memory, such as rotary frequencies, as the model itself does;
    weights stay as they are."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so that _init_weights leaves it alone
    for owner, module in _with_meta_buffers(model, device):
        owner._init_weights(module)


def _with_meta_buffers(model: Any, device: torch.device) -> Iterator[tuple[Any, nn.Module]]:
    """The modules that had some, each with the innermost of transformers' models around it: a decoder may be
    another architecture's than the model that it is part of."""
    float32 = float32_names(model)
    owners = {"": model}
    for path, module in model.named_modules():
        around = owners[path.rpartition(".")[0]]
        owners[path] = module if isinstance(module, PreTrainedModel) else around
        meta: dict[str, Tensor] = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
        for name, buffer in meta.items():
            wide = float32 is not None and float32.search(f"{path}.{name}")
            dtype = torch.float32 if wide else buffer.dtype
            module._buffers[name] = torch.zeros_like(buffer, dtype=dtype, device=device)
        if meta:
            yield owners[path], module
