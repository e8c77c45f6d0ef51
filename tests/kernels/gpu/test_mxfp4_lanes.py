"""A layer's experts in MXFP4 divided between GPU and CPU lane: the same sums, whoever computes which
columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE
from test_mxfp4_experts import EXPERTS, OAI, ON_GPU, SILU, Both

from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.lane_block import LaneBlock, LaneRates
from localmoe.experts.rest_block import RestBlock
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.routed_experts import split_quantum
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.mxfp4 import decode

TOP_K, TOKENS = 2, 40


class Store:
    """Records in MXFP4, as a lane asks for them."""

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
    quanta, interleaved = [split_quantum(inner, WeightForm.MXFP4)], [made.activation.interleaved]
    rests = RestBlock([made.packed], interleaved, quanta, torch.bfloat16, DEVICE) if completing else None
    block = LaneBlock(lane.mailbox, [inner], quanta, EXPERTS, DEVICE, rests=rests)
    lane.hold()
    try:
        yield lane, block
    finally:
        lane.close()


def keep_columns(made: Both, expert: int, first: int, last: int) -> None:
    """Down's other columns become zeros."""
    down = made.packed.mxfp4_views(made.codes[expert])[1]
    codes, scales = down.take()
    codes, scales = codes.clone(), scales.clone()
    codes[:, : first // 2] = codes[:, last // 2 :] = 0
    down.put(0, codes, scales)


def mlp(made: Both, x: Tensor, expert: int) -> Tensor:
    """float32 (T, H), by a plain formula."""
    matrices = made.packed.mxfp4_views(made.codes[expert])
    gate_up, down = (decode(m.take()[0].view(m.rows, -1, 16), m.take()[1]).float() for m in matrices)
    biases = [bias[expert].float().cpu() for bias in made.biases]
    gate, up = made.activation.split(x.float().cpu() @ gate_up.T + biases[0])
    inner = made.activation.apply(gate, up).bfloat16().float()
    out: Tensor = inner @ down.T + biases[1]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("activation", [SILU, OAI], ids=lambda activation: activation.kind)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 192), (128, 256)])
def test_each_lane_computes_its_columns_and_no_others(
    hidden: int, inner: int, activation: Activation
) -> None:
    """Triton's interpreter multiplies the bits of bfloat16, so its sums are compared with its own alone."""
    quantum = split_quantum(inner, WeightForm.MXFP4)
    index = torch.tensor([[1, -1]] * 3)
    for share in range(quantum, inner + 1, quantum):
        part = share / inner  # of one expert: part * first = (1 - part) * link
        rates = LaneRates(0.0, max(1.0 - part, 1e-6), 0.0, part)
        for of_cpu in (False, True):
            made = Both(hidden, inner, activation)
            keep_columns(made, 1, *((0, share) if of_cpu else (share, inner)))
            with lane_of(made) as (_, block):
                block.upload(0, rates)
                shared = made.run(made.codes, made.packed, 3, [], index, lane=block.view(0))
                assert block.view(0).share.tolist() == [0, share, 0, 0]
            if of_cpu:
                weights = torch.linspace(0.1, 1.0, 80).view(40, 2)[:3, :1]
                wanted = weights * mlp(made, made.x[:3], 1)
                assert (shared.float() - wanted).norm() < 1e-2 * wanted.norm()
            else:
                alone = made.run(made.codes, made.packed, 3, [], index)
                if share == inner:  # then the CPU adds the bias too
                    assert (shared - alone).float().norm() <= 1e-2 * alone.float().norm()
                else:
                    assert torch.equal(shared, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [SILU, OAI], ids=lambda activation: activation.kind)
@pytest.mark.parametrize(
    ("hidden", "inner"),
    [(64, 192), (128, 256), pytest.param(2880, 2880, id="gpt-oss")],
)
def test_every_division_gives_the_same_sums(hidden: int, inner: int, activation: Activation) -> None:
    made = Both(hidden, inner, activation)
    shares = set()
    with lane_of(made) as (lane, block):
        for link in (1e-6, 0.3, 0.6, 1.0, 2.0, 1e6):
            for tokens, landing in ((1, []), (5, [1]), (TOKENS, [])):
                before = lane.counters().num_bytes
                alone = made.run(made.codes, made.packed, tokens, landing)
                assert lane.counters().num_bytes == before
                block.upload(0, LaneRates(0.0, 1.0, 0.01, link))
                shared = made.run(made.codes, made.packed, tokens, landing, lane=block.view(0))
                error = (shared - alone).float().norm(dim=1) / alone.float().norm(dim=1)
                assert float(error.max()) < 5e-3, error  # of gate * up rounded to the neighbour
                found = block.view(0).share.tolist()
                assert bool(any(found)) == (lane.counters().num_bytes > before)
                shares |= set(found)
        report = block.read(block.numbers().cpu().numpy())
    assert not report.failed
    quantum = split_quantum(inner, WeightForm.MXFP4)
    assert quantum == (128 if inner % 128 == 0 else 64)
    assert {0, inner} < shares and all(share % quantum == 0 for share in shares)
