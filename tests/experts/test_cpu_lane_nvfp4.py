"""The CPU lane with records in NVFP4: every code, scale, factor and column by itself; what else holds of
them is with test_cpu_lane_fp8."""

from __future__ import annotations

import pytest
import torch
from test_cpu_lane import check_columns, rig

from localmoe.core.types import ExpertKey
from localmoe.kernels.activations import Activation
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.float8 import values
from localmoe.quant.nvfp4 import unpack

SCALE_OF_ONE = 0x38


@pytest.mark.slow  # code of its own is compiled; in a plain run test_nvfp4_models has some answers
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_every_code_scale_and_column_is_what_was_put(compute: torch.dtype) -> None:
    check_fours(compute)


def check_fours(compute: torch.dtype) -> None:
    """One column of x and one inner column at a time: what comes out is a column of down."""
    size, chance = 192, torch.Generator().manual_seed(6)
    options = {"activation": Activation("relu"), "caller_works": compute == torch.float32}
    with rig(size, size, form=WeightForm.NVFP4, compute=compute, **options) as made:
        gate, up, down = made.store.nvfp4_views(ExpertKey(0, 1))
        ones = (torch.eye(size).view(size, -1, 2) * torch.tensor([2.0, 32.0])).sum(2).byte()
        for matrix, factor in ((gate, 0.5), (up, 2.0)):  # gate * up = x
            assert matrix.put(0, ones, torch.full((size, size // 16), SCALE_OF_ONE).byte(), factor)
        codes = torch.randint(0, 256, (size, size // 2), generator=chance).byte()
        scales = torch.randint(0, 127, (size, size // 16), generator=chance).byte()
        assert len(codes.unique()) == 256 and len(scales.unique()) == 127, "all numbers"
        wanted = torch.empty(size, size)
        for first in range(0, size, 16):  # each strip has a factor of its own
            rows, factor = slice(first, first + 16), 1.5 * 2.0 ** (first - 90)
            assert down.put(first, codes[rows], scales[rows], factor)
            numbers = values()[unpack(codes[rows].reshape(-1)).long()].view(16, size)
            wanted[rows] = numbers * values()[scales[rows].long()].repeat_interleave(16, 1) * factor
        for one, other in zip(down.take(), (codes, scales), strict=False):
            assert torch.equal(one, other)
        check_columns(made, wanted)
