"""Routed experts of records in FP8, NVFP4 or INT4 give what their weights do in float64, wherever they are
read from; what else holds of them is with test_bf12_experts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from dense_cases import DEVICE
from test_bf12_experts import CLOSE, LARGER, ON_GPU, Both

from localmoe.kernels import fp8_tiles
from localmoe.kernels.fp8_tiles import Fp8Matrix
from localmoe.kernels.gpu import fp8_weights
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.float8 import values

SIZES = [(128, 192), (256, 128)]  # two steps and several along each matrix, whole groups of scales and not


FORMS = WeightForm.FP8, WeightForm.NVFP4, WeightForm.INT4, WeightForm.INT4_32


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("form", FORMS, ids=[form.value for form in FORMS])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("hidden", "inner"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.gpu) for size in LARGER)]
)
def test_outputs_are_those_in_float64(hidden: int, inner: int, gated: bool, form: WeightForm) -> None:
    made = Both(hidden, inner, gated=gated, form=form)
    for tokens in (1, 37):
        wanted = made.reference(tokens)
        found = [made.run(made.codes, made.packed, tokens, landing) for landing in ([], [1, 2], [3])]
        assert all(torch.equal(one, found[0]) for one in found)
        error = (found[0].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(error.max()) < CLOSE, error


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes, out, C: tl.constexpr, PTX: tl.constexpr
):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    for start in range(0, C, 64):
        here = tl.load(codes + fp8_weights.code_places(n, C) + start * 4)
        at = n[:, None] * C + start + tl.arange(0, 64)[None, :]
        tl.store(out + at, fp8_weights.decode(here, PTX))


@pytest.mark.parametrize("columns", [64, 192, 256])
def test_every_code_is_its_value(columns: int) -> None:
    numbers = torch.arange(256)[~values().isnan()].to(torch.uint8)
    codes = numbers.repeat(-(-48 * columns // len(numbers)))[: 48 * columns].view(48, columns)
    scales = torch.rand(48, -(-columns // 128))
    packed = torch.zeros(fp8_tiles.code_bytes(48, columns), dtype=torch.uint8)
    beside = torch.zeros(fp8_tiles.scale_bytes(48, columns), dtype=torch.uint8)
    matrix = Fp8Matrix.at(packed, beside, 48, columns)
    assert matrix.put(0, codes, scales)
    for one, other in zip(matrix.take(), (codes, scales), strict=True):
        assert torch.equal(one, other)
    out = torch.zeros(48, columns, dtype=torch.bfloat16, device=DEVICE)
    _decode_kernel[(3,)](packed.to(DEVICE).view(torch.int32), out, columns, ON_GPU)
    assert torch.equal(out.cpu().float(), values()[codes.long()])
