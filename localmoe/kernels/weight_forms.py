"""The forms in which an expert's weights lie in its record. Knows none of their bytes."""

from __future__ import annotations

from enum import Enum


class WeightForm(Enum):
    """PLAIN: floats of 16 or 32 bits. MXFP4: as published (kernels.mxfp4_tiles). BF12: bfloat16 in twelve
    bits, without loss (kernels.bf12_tiles). FP8, NVFP4: as published (kernels.fp8_tiles, nvfp4_tiles).
    INT4, INT4_32: the same of integers of four bits, with a scale for 128 or 32 columns (int4_tiles)."""

    PLAIN = "plain"
    MXFP4 = "mxfp4"
    BF12 = "bf12"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    INT4 = "int4"
    INT4_32 = "int4-32"

    @property
    def shown(self) -> str:
        """For people."""
        return "INT4" if self in (WeightForm.INT4, WeightForm.INT4_32) else self.name
