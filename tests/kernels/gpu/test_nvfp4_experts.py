"""Tiles of NVFP4 on a GPU and what is put into them; experts of such records are with test_fp8_experts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from dense_cases import DEVICE
from test_bf12_experts import ON_GPU

from localmoe.kernels import nvfp4_tiles
from localmoe.kernels.gpu import mxfp4_weights, nvfp4_weights
from localmoe.kernels.nvfp4_tiles import Nvfp4Matrix
from localmoe.quant.float8 import values
from localmoe.quant.nvfp4 import unpack


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes, scales, out, C: tl.constexpr, PTX: tl.constexpr
):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    for start in range(0, C, 64):
        here = tl.load(codes + mxfp4_weights.code_places(n, C, 64) + start * 2)
        beside = tl.load(scales + nvfp4_weights.scale_places(n, C) + start // 64 * 16)
        at = n[:, None] * C + start + tl.arange(0, 64)[None, :]
        tl.store(out + at, nvfp4_weights.decode(here, beside, PTX))


@pytest.mark.parametrize("columns", [64, 192, 256])
def test_every_code_times_every_scale_is_its_value(columns: int) -> None:
    rows, chance = 16 * 127, torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=chance).byte()
    scales = torch.arange(127).repeat(rows * columns // 16 // 127 + 1)[: rows * columns // 16].byte()
    scales = scales.view(rows, -1)
    packed = torch.zeros(nvfp4_tiles.code_bytes(rows, columns), dtype=torch.uint8)
    beside = torch.zeros(nvfp4_tiles.side_bytes(rows, columns), dtype=torch.uint8)
    matrix = Nvfp4Matrix.at(packed, beside, rows, columns)
    assert matrix.put(0, codes, scales, 0.25)
    found, found_scales, factors = matrix.take()
    assert torch.equal(found, codes) and torch.equal(found_scales, scales) and (factors == 0.25).all()
    out = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    words = [memory.to(DEVICE).view(torch.int32) for memory in (packed, beside)]
    _decode_kernel[(rows // 16,)](*words, out, columns, ON_GPU)
    numbers = values()[unpack(codes.reshape(-1)).long()].view(rows, columns)
    assert torch.equal(out.cpu().float(), numbers * values()[scales.long()].repeat_interleave(16, 1))


def test_scales_that_are_no_numbers_or_below_zero_are_told() -> None:
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    packed, beside = (
        torch.zeros(size, dtype=torch.uint8)
        for size in (nvfp4_tiles.code_bytes(16, 64), nvfp4_tiles.side_bytes(16, 64))
    )
    matrix = Nvfp4Matrix.at(packed, beside, 16, 64)
    for wrong in (0x7F, 0x80, 0xFF):
        scales = torch.zeros(16, 4, dtype=torch.uint8)
        assert matrix.put(0, codes, scales, 1.0)
        scales[7, 2] = wrong
        assert not matrix.put(0, codes, scales, 1.0)
