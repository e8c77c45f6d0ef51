"""Experts in BF12, FP8 and NVFP4 divided between GPU and CPU: each computes its columns, strays too, and what
the CPU computed follows into the slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("numba")

from dense_cases import DEVICE
from support.same_records import same_record
from test_bf12_experts import CLOSE, EXPERTS, ON_GPU, Both

from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.lane_block import LaneBlock, LaneRates
from localmoe.experts.rest_block import RestBlock
from localmoe.kernels.gpu.copy_rest import copy_rest
from localmoe.kernels.gpu.routed_experts import split_quantum
from localmoe.kernels.rests import COLUMNS, COPIED, PLANNED
from localmoe.kernels.weight_forms import WeightForm

TOP_K, TOKENS = 2, 40
FORMS = (WeightForm.BF12, WeightForm.FP8, WeightForm.NVFP4)


class Store:
    """Packed records, as a lane asks for them."""

    def __init__(self, made: Both) -> None:
        self.made, self.layouts, self.num_layers = made, [made.packed], 1
        self.num_experts, self.dtype = EXPERTS, made.weights.dtype

    def record(self, key: tuple[int, int]) -> Tensor:
        return self.made.codes[key[1]]


@contextmanager
def lane_of(made: Both, *, completing: bool = False) -> Iterator[tuple[CpuLane, LaneBlock]]:
    lane = CpuLane(
        Store(made), made.activation, [tuple(made.biases)],  # type: ignore[arg-type, list-item]
        tokens=TOKENS, top_k=TOP_K, threads=2, pinned=ON_GPU,
    )  # fmt: skip
    inner = made.packed.inner
    quanta = [split_quantum(inner, made.packed.form)]
    rests = RestBlock([made.packed], [False], quanta, torch.bfloat16, DEVICE) if completing else None
    block = LaneBlock(lane.mailbox, [inner], quanta, EXPERTS, DEVICE, rests=rests)
    lane.hold()
    try:
        yield lane, block
    finally:
        lane.close()


def splitting(share: float, rest_us: float = 0.0) -> LaneRates:
    """Rates by which the CPU gets this share of an expert that alone is missing."""
    return LaneRates(0.0, max(1.0 - share, 1e-6), 0.0, share, rest_us)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 192), (128, 256)])
def test_every_division_gives_the_same_sums(hidden: int, inner: int, form: WeightForm) -> None:
    made = Both(hidden, inner, form=form)
    quantum = split_quantum(inner, form)
    index = torch.tensor([[1, -1]] * 3)
    weights = torch.linspace(0.1, 1.0, 80).view(40, 2).double()[:3, :1]
    wanted = weights * made.expert(1, made.x[:3])
    with lane_of(made) as (lane, block):
        for share in range(quantum, inner + 1, quantum):
            block.upload(0, splitting(share / inner))
            found = made.run(made.codes, made.packed, 3, [], index, lane=block.view(0)).double()
            assert block.view(0).share.tolist() == [0, share, 0, 0]
            error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert float(error.max()) < CLOSE, (share, error)
        assert lane.counters().jobs == inner // quantum


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("hidden", "inner"), [(64, 192), (128, 256), pytest.param(2048, 1408, marks=pytest.mark.gpu)]
)
def test_a_split_expert_is_whole_once_its_rest_is_copied(hidden: int, inner: int, form: WeightForm) -> None:
    made = Both(hidden, inner, form=form)
    quantum, record = split_quantum(inner, form), made.codes[1]
    with lane_of(made, completing=True) as (_, block):
        rest = block.view(0).rest
        assert rest is not None
        for share in range(quantum, inner, quantum):
            made.slots.fill_(255)
            block.upload(0, splitting(share / inner, rest_us=1e9))
            made.run(made.codes, made.packed, 1, [2], torch.tensor([[1, -1]]), lane=block.view(0))
            assert int(rest.job[COLUMNS]) == share
            copy_rest(rest)
            assert same_record(made.packed, made.slots[2], record)
            assert (made.slots[2, len(record) :] == 255).all() and (made.slots[3] == 255).all()
            assert int(rest.words[COPIED]) == int(rest.words[PLANNED])
