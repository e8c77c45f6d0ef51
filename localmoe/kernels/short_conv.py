"""Short causal convolutions of decoder layers, alone (Liquid AI's LFM2: y = C * conv(B * x)) or before a
state: torch references in the tensors' own dtype. Keeps no state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_convolution(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(T, C) -> (T, C), each channel by itself.

    Args:
        before: (taps - 1, C) of the tokens before. weight: (C, taps). bias: (C,).
    """
    rows = torch.cat((before, x)).T[None]
    found: Tensor = F.conv1d(rows, weight[:, None], bias, groups=len(weight))
    return found[0].T


def reference_short_conv(
    projected: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What comes out of a layer before its last projection.

    Args:
        projected: (T, 3 C): B, C and x.
        before: (taps - 1, C) products B * x of the tokens before. weight, bias: as of reference_convolution.

    Returns:
        (T, C), and the products of its tokens.
    """
    b, c, x = projected.chunk(3, dim=1)
    products = b * x
    return c * reference_convolution(products, before, weight, bias), products
