"""The forms in which an expert's weights lie in its record. Knows none of their bytes."""

from __future__ import annotations

from enum import Enum


class WeightForm(Enum):
    """PLAIN: floats of 16 or 32 bits. MXFP4: as published (kernels.mxfp4_tiles). BF12: bfloat16 in twelve
    bits, without loss (kernels.bf12_tiles). FP8, NVFP4: as published (kernels.fp8_tiles, nvfp4_tiles)."""

    PLAIN = "plain"
    MXFP4 = "mxfp4"
    BF12 = "bf12"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
