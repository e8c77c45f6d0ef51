"""Inputs of the dense kernels' tests: random tensors in seas of NaN, and how far a result may be off."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter knows no bfloat16 products
DTYPES = [torch.bfloat16, torch.float16] if torch.cuda.is_available() else [torch.float16]
_PROMISED = torch.empty  # tests replace torch.empty


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers on the device, the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(device=DEVICE, dtype=dtype)


def in_nan(tensor: Tensor, before: int = 16, after: int = 48) -> Tensor:
    """The same numbers as a view into a tensor of NaN that is larger in the last two dimensions."""
    shape = [size + before + after if i >= tensor.dim() - 2 else size for i, size in enumerate(tensor.shape)]
    sea = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = sea[
        tuple(slice(before, before + s) if shape[i] != s else slice(None) for i, s in enumerate(tensor.shape))
    ]
    view.copy_(tensor)
    return view


def poisoned_empty(*args: object, **options: object) -> Tensor:
    """torch.empty full of NaN, or of a number that is no index."""
    made: Tensor = _PROMISED(*args, **options)  # type: ignore[call-overload]
    return made.fill_(torch.nan if made.is_floating_point() else -(1 << 20))


def ulp(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighbours in `dtype` around each reference value."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(reference.double().abs().clamp_min(info.tiny)))
    return torch.exp2(exponent) * info.eps


def assert_rounded(result: Tensor, exact: Tensor, slack: Tensor | float, ulps: float = 0.51) -> None:
    """`result` is `exact` (float64), off by float32 sums (`slack`), rounded to result.dtype."""
    assert result.shape == exact.shape
    assert not result.isnan().any()
    error = (result.double() - exact).abs()
    excess = error - ulps * ulp(exact, result.dtype) - slack
    at = int(excess.argmax())
    assert excess.max() <= 0, f"off by {error.flatten()[at]} at {exact.flatten()[at]}"
