"""The CPU lane with records in BF12: against float64, with weights that the codes have no room for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_lane import KINDS, LAYERS, TOKENS, TOP_K, Rig, check_ahead_bytes, check_columns, check_jobs, rig
from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.kernels.activations import Activation
from localmoe.kernels.bf12_tiles import NOWHERE
from localmoe.kernels.weight_forms import WeightForm

PLAIN_KINDS = [kind for kind in KINDS if not kind.interleaved]


def scatter(weights: Tensor, generator: torch.Generator, numbers: list[float], count: int) -> None:
    """Put `count` of each of the numbers anywhere into a matrix."""
    for number in numbers:
        places = torch.randint(0, weights.numel(), (count,), generator=generator)
        weights.view(-1)[places] = number


def refill(made: Rig, numbers: list[float], count: int, scale: float = 1.0) -> None:
    """Put new weights into all records: normal ones, and `count` of each of the numbers."""
    generator = torch.Generator().manual_seed(count)
    for layer in range(LAYERS):
        for expert in range(made.store.num_experts):
            for matrix in made.store.bf12_views(ExpertKey(layer, expert)):
                shape = matrix.rows, matrix.columns
                weights = (torch.randn(shape, generator=generator) * scale * shape[1] ** -0.5).bfloat16()
                scatter(weights, generator, numbers, count)
                matrix.put(0, weights)
                assert torch.equal(matrix.take().view(torch.int16), weights.view(torch.int16))


@pytest.mark.parametrize(
    ("compute", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 3e-6)], ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize(
    "activation", PLAIN_KINDS, ids=[kind.kind if kind.gated else "ungated" for kind in PLAIN_KINDS]
)
@settings(max_examples=2)
@given(
    st.sampled_from([64, 128, 192, 320]), st.sampled_from([64, 128, 192]), st.booleans(), st.integers(1, 4),
    st.data(),
)  # fmt: skip
def test_every_job_equals_float64(
    compute: torch.dtype, tolerance: float, activation: Activation, hidden: int, inner: int, biased: bool,
    threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    options = {"activation": activation, "biased": biased, "threads": threads}
    if compute == torch.float32:
        options |= {"compute": compute}
    with rig(hidden, inner, form=WeightForm.BF12, **options) as made:
        refill(made, [100.0, 2.0**-40, 0.0, 1e-39, -(2.0**-128)], 4)
        check_jobs(made, data, 64, tolerance)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_every_code_stray_and_column_is_the_weight_that_was_put(compute: torch.dtype) -> None:
    """One column of x and one inner column at a time: what comes out is a column of down."""
    size = 128
    with rig(size, size, form=WeightForm.BF12, activation=Activation("relu"), compute=compute) as made:
        gate, up, down = made.store.bf12_views(ExpertKey(0, 1))
        for matrix in (gate, up):  # gate = up = x
            matrix.put(0, torch.eye(size).bfloat16())
        generator = torch.Generator().manual_seed(5)
        signs = torch.randint(0, 2, (size, size), generator=generator) * 2 - 1
        powers = torch.randint(-14, 1, (size, size), generator=generator)
        shifts = torch.randint(-80, 40, (size, 1), generator=generator)
        weights = (
            signs * (1 + torch.rand(size, size, generator=generator)) * 2.0 ** (powers + shifts)
        ).bfloat16()
        scatter(weights, generator, [2.0**-120, -(2.0**90), 2.0**-130, 0.0, -0.0], 3)
        down.put(0, weights)
        assert (down.places != NOWHERE).any()
        check_columns(made, weights.float())


def test_weights_that_are_no_numbers_and_activations_far_from_one_keep_their_meaning() -> None:
    with rig(64, 64, form=WeightForm.BF12, activation=Activation("relu"), compute=torch.float32) as made:
        for matrix in made.store.bf12_views(ExpertKey(1, 2))[:2]:
            matrix.put(0, torch.eye(64).bfloat16())
        weights = torch.full((64, 64), 0.5, dtype=torch.bfloat16)
        weights[3, 5], weights[4, 6], weights[5, 7] = torch.inf, -torch.inf, torch.nan
        made.store.bf12_views(ExpertKey(1, 2))[2].put(0, weights)
        for scale in (2.0**-20, 1.0, 2.0**20):
            made.x = torch.full((TOKENS, 64), scale)
            out = made.lane.compute(1, made.x, [(2, [7], 64)])[7]
            assert out[3] == torch.inf and out[4] == -torch.inf and out[5].isnan()
            kept = torch.cat((out[:3], out[6:]))
            assert torch.equal(kept, torch.full((61,), 32 * scale * scale))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_a_tokens_sums_with_strays_do_not_depend_on_the_tokens_beside_it(compute: torch.dtype) -> None:
    with rig(192, 128, form=WeightForm.BF12, compute=compute) as made:
        refill(made, [2.0**-30, 1.5, -2.0], 8)
        pairs = [TOP_K * token for token in range(TOKENS)]
        for share in (64, 128):
            alone = [made.lane.compute(0, made.x, [(2, [pair], share)])[pair].clone() for pair in pairs]
            for count in range(2, TOKENS + 1):
                together = made.lane.compute(0, made.x, [(2, pairs[:count], share)])
                assert all(torch.equal(together[pair], alone[i]) for i, pair in enumerate(pairs[:count]))


def test_strays_beyond_a_share_are_left_to_whoever_computes_the_rest() -> None:
    with rig(64, 192, form=WeightForm.BF12, compute=torch.float32, biased=True) as made:
        refill(made, [3.0, -2.0, 2.0**-30], 12)
        for share in (64, 128, 192):
            out = made.lane.compute(0, made.x, [(3, [4, 8], share)]).double()
            for pair in (4, 8):
                wanted = made.wanted(0, 3, pair // TOP_K, share)
                assert (out[pair] - wanted).norm() <= 3e-6 * wanted.norm()


def test_what_is_read_and_fetched_ahead_is_counted_in_bytes_of_bf12() -> None:
    with rig(192, 128, form=WeightForm.BF12, threads=2) as made:
        check_ahead_bytes(made, lambda weights: weights * 12 // 8)


@pytest.mark.parametrize(
    "options", [{"activation": KINDS[4]}, {"transposed": True}, {"compute": torch.float16}], ids=str
)
def test_what_the_form_has_no_order_or_room_for_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(AssertionError), rig(64, 64, form=WeightForm.BF12, **options):
        pass
