"""The numbers by which device code knows the forms of experts' records (kernels.weight_forms)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton.language as tl

from localmoe.kernels.weight_forms import WeightForm

PLAIN = tl.constexpr(0)
MXFP4 = tl.constexpr(1)
BF12 = tl.constexpr(2)
FP8 = tl.constexpr(3)
NVFP4 = tl.constexpr(4)
INT4 = tl.constexpr(5)
INT4_32 = tl.constexpr(6)

NUMBERS: Mapping[WeightForm, int] = MappingProxyType(
    {
        WeightForm.PLAIN: 0, WeightForm.MXFP4: 1, WeightForm.BF12: 2, WeightForm.FP8: 3,
        WeightForm.NVFP4: 4, WeightForm.INT4: 5, WeightForm.INT4_32: 6,
    }
)  # fmt: skip
