"""The CPU lane with records in FP8, NVFP4 and INT4 against float64, and every code, scale and column of FP8
by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_lane import KINDS, check_ahead_bytes, check_columns, check_jobs, rig

from localmoe.core.types import ExpertKey
from localmoe.kernels.activations import Activation
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.float8 import values

ONE = 0x38  # the code of 1
FORMS = WeightForm.FP8, WeightForm.NVFP4, WeightForm.INT4, WeightForm.INT4_32
NAMES = [form.value for form in FORMS]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize(
    ("compute", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 3e-6)], ids=["bfloat16", "float32"]
)
@settings(max_examples=8)
@given(
    st.sampled_from([64, 128, 192, 320]), st.sampled_from([64, 128, 192]),
    st.sampled_from([kind for kind in KINDS if not kind.interleaved]), st.booleans(), st.integers(1, 4),
    st.data(),
)  # fmt: skip
def test_every_job_equals_float64(
    compute: torch.dtype, tolerance: float, form: WeightForm, hidden: int, inner: int,
    activation: Activation, biased: bool, threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    options = {"activation": activation, "biased": biased, "threads": threads}
    if compute == torch.float32:
        options |= {"compute": compute}
    with rig(hidden, inner, form=form, **options) as made:
        check_jobs(made, data, 64, tolerance)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_every_code_scale_and_column_is_what_was_put(compute: torch.dtype) -> None:
    check_codes(compute)


def check_codes(compute: torch.dtype) -> None:
    """One column of x and one inner column at a time: what comes out is a column of down."""
    size, chance = 192, torch.Generator().manual_seed(6)
    options = {"activation": Activation("relu"), "caller_works": compute == torch.float32}
    with rig(size, size, form=WeightForm.FP8, compute=compute, **options) as made:
        gate, up, down = made.store.fp8_views(ExpertKey(0, 1))
        for matrix, scale in ((gate, 0.5), (up, 2.0)):  # gate * up = x
            matrix.put(0, torch.eye(size).byte() * ONE, torch.full((size, 2), scale))
        codes = torch.randint(0, 256, (size, size), generator=chance).byte()
        codes[codes & 127 == 127] = 0
        shifts = torch.randint(-100, 110, (size, 2), generator=chance)
        scales = (1 + torch.rand(size, 2, generator=chance)) * 2.0**shifts
        down.put(0, codes, scales)
        assert len(codes.unique()) == 254, "all numbers"
        wanted = values()[codes.long()] * scales.repeat_interleave(128, 1)[:, :size]
        check_columns(made, wanted)


@pytest.mark.parametrize(
    ("form", "sixteenths"),
    [
        (WeightForm.FP8, 16.5),
        pytest.param(WeightForm.NVFP4, 9, marks=pytest.mark.slow),
        pytest.param(WeightForm.INT4, 8.5, marks=pytest.mark.slow),
        pytest.param(WeightForm.INT4_32, 10, marks=pytest.mark.slow),
    ],
    ids=NAMES,
)
def test_what_is_read_and_fetched_ahead_is_counted_in_bytes_of_the_form(
    form: WeightForm, sixteenths: float
) -> None:
    with rig(192, 128, form=form, threads=2) as made:
        check_ahead_bytes(made, lambda weights: int(weights * sixteenths / 16))


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("options", [{"activation": KINDS[4]}, {"transposed": True}], ids=str)
def test_what_the_form_has_no_order_for_is_refused(form: WeightForm, options: dict[str, object]) -> None:
    with pytest.raises(AssertionError), rig(64, 64, form=form, **options):
        pass
