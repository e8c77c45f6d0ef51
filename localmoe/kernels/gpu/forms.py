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
        WeightForm.PLAIN: PLAIN.value, WeightForm.MXFP4: MXFP4.value, WeightForm.BF12: BF12.value,
        WeightForm.FP8: FP8.value, WeightForm.NVFP4: NVFP4.value, WeightForm.INT4: INT4.value,
        WeightForm.INT4_32: INT4_32.value,
    }
)  # fmt: skip
