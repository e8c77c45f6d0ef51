"""Tiles of INT4 on a GPU and what is put into them; experts of such records are with test_fp8_experts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from dense_cases import DEVICE
from test_bf12_experts import ON_GPU

from localmoe.kernels import int4_tiles
from localmoe.kernels.gpu import int4_weights, mxfp4_weights
from localmoe.kernels.int4_tiles import Int4Matrix


def _matrix(rows: int, columns: int, span: int) -> tuple[torch.Tensor, torch.Tensor, Int4Matrix]:
    packed = torch.zeros(int4_tiles.code_bytes(rows, columns), dtype=torch.uint8)
    beside = torch.zeros(int4_tiles.side_bytes(rows, columns, span), dtype=torch.uint8)
    return packed, beside, Int4Matrix.at(packed, beside, rows, columns, span)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes, beside, out, C: tl.constexpr, SPAN: tl.constexpr, PTX: tl.constexpr
):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    for start in range(0, C, 64):
        here = tl.load(codes + mxfp4_weights.code_places(n, C, 64) + start * 2)
        places = int4_weights.scale_places(n, C, SPAN)[:, None] + (start + tl.arange(0, 8) * 8) // SPAN * 16
        at = n[:, None] * C + start + tl.arange(0, 64)[None, :]
        tl.store(out + at, int4_weights.decode(here, tl.load(beside + places) & 31, PTX))


@pytest.mark.parametrize("span", [32, 128])
@pytest.mark.parametrize("columns", [64, 192, 256])
def test_every_code_less_every_zero_point_is_its_value(columns: int, span: int) -> None:
    rows, chance = 16 * 17, torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=chance).byte()
    spans = -(-columns // span)
    zeros = (torch.arange(rows * spans) % 17).view(rows, spans).byte()
    scales = torch.randn(rows, spans, generator=chance).half().float()
    packed, beside, matrix = _matrix(rows, columns, span)
    assert matrix.put(0, codes, scales, zeros)
    for one, other in zip(matrix.take(), (codes, scales, zeros), strict=True):
        assert torch.equal(one, other)
    out = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    words = [memory.to(DEVICE).view(torch.int32) for memory in (packed, beside)]
    _decode_kernel[(rows // 16,)](*words, out, columns, span, ON_GPU)
    numbers = torch.stack((codes & 15, codes >> 4), -1).view(rows, columns).float()
    wanted = numbers - zeros.float().repeat_interleave(span, 1)[:, :columns]
    assert torch.equal(out.cpu().float(), wanted)


def test_scales_that_have_no_room_or_are_no_numbers_are_told() -> None:
    matrix = _matrix(16, 64, 128)[2]
    codes, zeros = torch.zeros(16, 32, dtype=torch.uint8), torch.full((16, 1), 8, dtype=torch.uint8)
    for wrong in (torch.inf, torch.nan, 1 / 3):
        scales = torch.ones(16, 1)
        assert matrix.put(0, codes, scales, zeros)
        scales[7] = wrong
        assert not matrix.put(0, codes, scales, zeros)
