"""Give a model's RMS norms on the CPU compiled code, each if that gives on a trial what the module itself
gives."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from localmoe.kernels.cpu.row_ops import rms_norm
from localmoe.model.norms import norm_parts

_ROWS = 5
_SAME = 1e-6  # of what the whole amounts to: float32 sums in another order


def compile_norms(model: nn.Module) -> None:
    """Replace the forward of norms in float32 that are recognised; see model.uninstall."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _try(module)


@torch.inference_mode()
def _try(module: nn.Module) -> None:
    parts = norm_parts(module)
    if parts is None or parts[0].dtype != torch.float32 or not parts[0].is_contiguous():
        return
    weight, eps = parts
    x = torch.randn(_ROWS, weight.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    wanted = module(x)
    for offset in (0.0, 1.0):
        kernel = partial(rms_norm, weight=weight, eps=eps, offset=offset)
        if wanted.dtype == x.dtype and (kernel(x) - wanted).norm() <= _SAME * wanted.norm():
            module.forward = kernel
            return
