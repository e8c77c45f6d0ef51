"""The CPU lane with records in MXFP4: against float64, and every code, scale and column by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_lane import KINDS, check_ahead_bytes, check_columns, check_jobs, rig

from localmoe.core.types import ExpertKey
from localmoe.kernels.activations import Activation
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.mxfp4 import decode

GATED = [kind for kind in KINDS if kind.gated]  # the form has no others


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("compute", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 3e-6)], ids=["bfloat16", "float32"]
)
@settings(max_examples=6)
@given(
    st.sampled_from([64, 128, 192, 320]), st.sampled_from([64, 128, 192]), st.booleans(),
    st.sampled_from(GATED), st.booleans(), st.integers(1, 4), st.data(),
)  # fmt: skip
def test_every_job_equals_float64(
    compute: torch.dtype, tolerance: float, hidden: int, inner: int, transposed: bool,
    activation: Activation, biased: bool, threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    """transposed: as the model's module is, which changes nothing of the record."""
    options = {"transposed": transposed, "activation": activation, "biased": biased, "threads": threads}
    if compute == torch.float32:
        options |= {"compute": compute}
    with rig(hidden, inner, form=WeightForm.MXFP4, **options) as made:
        check_jobs(made, data, 64, tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_code_scale_and_column_is_what_it_is_published_as(interleaved: bool) -> None:
    """One column of x and one inner column at a time: what comes out is a column of down."""
    size, chance = 128, torch.Generator().manual_seed(4)
    with rig(
        size, size, form=WeightForm.MXFP4, activation=Activation("relu", interleaved=interleaved)
    ) as made:
        gate_up, down = made.store.mxfp4_views(ExpertKey(0, 1))
        one = torch.zeros(2 * size, size, dtype=torch.uint8)  # gate = up = x
        rows = torch.arange(size)
        for part in range(2):
            one[2 * rows + part if interleaved else rows + part * size, rows] = 2  # the code of 1
        gate_up.put(0, one[:, 0::2] | one[:, 1::2] << 4, torch.full((2 * size, size // 32), 127).byte())
        codes = torch.randint(0, 256, (size, size // 2), dtype=torch.uint8, generator=chance)
        scales = torch.randint(0, 253, (size, size // 32), dtype=torch.uint8, generator=chance)
        scales[0, 0], scales[1, 1] = 0, 1  # 2^-127 and 2^-126
        down.put(0, codes, scales)
        wanted = decode(codes.view(size, -1, 16), scales).float()
        check_columns(made, wanted)


def test_what_is_read_and_fetched_ahead_is_counted_in_bytes_of_mxfp4() -> None:
    with rig(192, 128, form=WeightForm.MXFP4, threads=2) as made:
        check_ahead_bytes(made, lambda weights: weights * 17 // 32)
