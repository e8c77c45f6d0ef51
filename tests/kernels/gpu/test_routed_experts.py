"""Routed experts against float64, in every layout of a record, read from slots and from the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.plain_groups import Row
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE, DTYPES, in_nan, poisoned_empty

from localmoe.experts.records import RecordLayout
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import (
    ExpertShape,
    combine,
    down_launch,
    gate_up_launch,
    routed_experts,
)
from localmoe.kernels.mxfp4_tiles import TILE_COLUMNS
from localmoe.kernels.residency import ON_HOST, ResidencyView
from localmoe.kernels.weight_forms import WeightForm

ON_GPU = DEVICE.type == "cuda"
HIDDEN, INNER, SLOT_ROOM = 48, 80, 24  # no multiples of a block; weights of a slot that no record fills
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 1e-2}  # of a row's norm: hidden values are rounded
SILU = Activation("silu")
OAI = Activation("swiglu_oai", 1.702, 7.0, interleaved=True)
UNGATED = Activation("relu", gated=False)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    new_empty = Tensor.new_empty

    def poisoned_new_empty(tensor: Tensor, *shape: object, **options: object) -> Tensor:
        made: Tensor = new_empty(tensor, *shape, **options)  # type: ignore[arg-type]
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty)
        patch.setattr(Tensor, "new_empty", poisoned_new_empty)
        yield


@dataclass
class Bench:
    """Experts of one layer as host records, an arena of slots, and biases."""

    shape: ExpertShape
    layout: RecordLayout
    host: Tensor  # (E, elements)
    arena: Tensor  # (slots, more elements), NaN where nothing was put
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def record(self, expert: int) -> Tensor:
        return self.host[expert]

    def slot(self, slot: int) -> int:
        return self.arena[slot].data_ptr()

    def put(self, expert: int, slot: int) -> None:
        self.arena[slot, : self.layout.elements].copy_(self.record(expert))

    def held(self, slot: int) -> Tensor:
        return self.arena[slot].cpu()

    def row(self, tickets: list[int], slots: dict[int, int], landing: list[int], done: int) -> Row:
        """The table's row: `slots` of experts, and free ones; nobody is replaced."""
        address = [
            self.slot(slots[e]) if e in slots else self.record(e).data_ptr() for e in range(len(tickets))
        ]
        free = [self.slot(slot) for slot in landing] + [0] * (4 - len(landing))
        home = [self.record(e).data_ptr() for e in range(len(self.host))]
        return Row(address, home, tickets, [torch.inf] * len(tickets), free, done)


def bench(
    *,
    transposed: bool = False,
    activation: Activation = SILU,
    biased: bool = False,
    experts: int = 5,
    slots: int = 4,
    dtype: torch.dtype = DTYPES[0],
    hidden: int = HIDDEN,
    inner: int = INNER,
) -> Bench:
    height = 2 * inner if activation.gated else inner
    gate_up, down = (height, hidden), (hidden, inner)
    if transposed:
        gate_up, down = gate_up[::-1], down[::-1]
    layout = RecordLayout(gate_up, down, transposed)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(experts, layout.elements, generator=generator) * hidden**-0.5
    host = torch.zeros(experts, layout.elements, dtype=dtype, pin_memory=ON_GPU)
    host.copy_(values)
    arena = torch.full((slots, layout.elements + SLOT_ROOM), torch.nan, dtype=dtype, device=DEVICE)
    biases = [torch.randn(experts, size, generator=generator) for size in (height, hidden)]
    found = [bias.to(DEVICE, dtype) if biased else None for bias in biases]
    return Bench(ExpertShape(hidden, inner, transposed, activation), layout, host, arena, *found)


def view_of(row: Row) -> ResidencyView:
    return ResidencyView(
        torch.tensor(row.address, device=DEVICE),
        torch.tensor(row.home, device=DEVICE),
        torch.tensor(row.ticket, device=DEVICE),
        torch.tensor(row.score, dtype=torch.float32, device=DEVICE),
        torch.tensor(row.landing, device=DEVICE),
        torch.tensor([row.done], device=DEVICE),
        torch.zeros(len(row.address), dtype=torch.int32, device=DEVICE),
    )


def routing(tokens: int, top_k: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """index (T, K) of different experts a token, and weights."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
    return index.to(DEVICE), (torch.rand(tokens, top_k, generator=generator) + 0.1).to(DEVICE)


def reference(made: Bench, x: Tensor, index: Tensor, weights: Tensor, live: int) -> Tensor:
    """(T, H) in float64; hidden values are rounded to x.dtype, as between the two products."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(live):
        for k, expert in enumerate(index[token].tolist()):
            if not 0 <= expert < len(made.host):
                continue
            gate_up, down = made.layout.views(made.record(expert).double())
            if made.layout.transposed:
                gate_up, down = gate_up.T, down.T
            both = gate_up @ x[token].cpu().double()
            if made.gate_up_bias is not None:
                both = both + made.gate_up_bias[expert].cpu().double()
            gate, up = made.shape.activation.split(both)
            y = down @ made.shape.activation.apply(gate, up).to(x.dtype).double()
            if made.down_bias is not None:
                y = y + made.down_bias[expert].cpu().double()
            out[token] += float(weights[token, k]) * y
    return out


def run(made: Bench, x: Tensor, index: Tensor, weights: Tensor, live: int, view: ResidencyView) -> Tensor:
    count = torch.tensor([live], device=DEVICE)
    groups = group_pairs(index, count, view)
    return routed_experts(
        x, groups, index, weights, count, view.done, made.shape, len(made.host),
        gate_up_bias=made.gate_up_bias, down_bias=made.down_bias,
    ).cpu()  # fmt: skip


def assert_close(out: Tensor, exact: Tensor, live: int) -> None:
    assert out.shape == exact.shape and not out.isnan().any()
    assert (out[live:] == 0).all()
    error, size = (out - exact).double().norm(dim=1), exact.norm(dim=1)
    assert (error <= TOLERANCE[out.dtype] * size)[:live].all(), (error / size)[:live].max()


def inputs(tokens: int, dtype: torch.dtype = DTYPES[0], hidden: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return in_nan(torch.randn(tokens, hidden, generator=generator).to(DEVICE, dtype))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", [SILU, OAI, UNGATED], ids=lambda activation: activation.kind)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_layout_from_slots_and_from_the_host(
    transposed: bool, activation: Activation, biased: bool
) -> None:
    for dtype in DTYPES:
        made = bench(transposed=transposed, activation=activation, biased=biased, dtype=dtype)
        made.put(1, 3)
        made.put(4, 0)
        x, (index, weights) = inputs(6, dtype), routing(6, 3, 5)
        view = view_of(made.row([ON_HOST, 0, ON_HOST, ON_HOST, 0], {1: 3, 4: 0}, [2], 0))
        out = run(made, x, index, weights, 5, view)
        assert out.dtype == dtype
        assert_close(out, reference(made, x, index, weights, 5), 5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [SILU, OAI, UNGATED], ids=lambda activation: activation.kind)
def test_what_is_read_from_the_host_lies_in_its_slot_afterwards_and_nothing_else_is_touched(
    transposed: bool, activation: Activation
) -> None:
    made = bench(transposed=transposed, activation=activation)
    made.put(2, 1)
    index = torch.tensor([[0, 2], [3, 0], [4, 3]], device=DEVICE)
    before = made.arena.clone()
    hosts = made.host.clone()
    view = view_of(made.row([ON_HOST, ON_HOST, 0, ON_HOST, ON_HOST], {2: 1}, [2, 0], 0))
    run(made, inputs(3), index, torch.ones(3, 2, device=DEVICE), 3, view)
    elements = made.layout.elements
    for expert, slot in ((0, 2), (3, 0)):  # 4 found no room
        assert torch.equal(made.held(slot)[:elements], made.record(expert))
        assert made.held(slot)[elements:].isnan().all()
        before[slot] = made.arena[slot]
    torch.testing.assert_close(made.arena, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(made.host, hosts)


@pytest.mark.parametrize("transposed", [False, True])
def test_more_rows_than_a_tile_holds(transposed: bool) -> None:
    made = bench(transposed=transposed, experts=3)
    made.put(0, 3)
    x, (index, weights) = inputs(37), routing(37, 2, 3, seed=3)
    assert min((index == e).sum() for e in range(3)) > 16
    view = view_of(made.row([0, ON_HOST, ON_HOST], {0: 3}, [1], 0))  # 1 is kept while it is read, 2 is not
    out = run(made, x, index, weights, 37, view)
    assert_close(out, reference(made, x, index, weights, 37), 37)
    assert torch.equal(made.held(1)[: made.layout.elements], made.record(1))


def test_a_rows_bits_do_not_depend_on_what_rides_along_nor_on_where_weights_are() -> None:
    made = bench(experts=4)
    x, (index, weights) = inputs(20), routing(20, 2, 4, seed=5)
    all_here = made.row([0] * 4, {e: e for e in range(4)}, [], 0)
    for expert in range(4):
        made.put(expert, expert)
    whole = run(made, x, index, weights, 20, view_of(all_here))
    nobody_here = made.row([ON_HOST] * 4, {}, [], 0)
    assert torch.equal(run(made, x, index, weights, 20, view_of(nobody_here)), whole)
    for at in (0, 13):
        alone = run(made, x[at : at + 1], index[at : at + 1], weights[at : at + 1], 1, view_of(all_here))
        assert torch.equal(alone[0], whole[at])


@pytest.mark.parametrize("activation", [SILU, OAI, UNGATED], ids=lambda activation: activation.kind)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_prompts_kernel_gives_the_bits_of_a_windows(transposed: bool, activation: Activation) -> None:
    """It waits for no copy, writes to no slot, and has tall tiles. A sum of one block would start from the
    bias in one of them, and end with it in the other."""
    made = bench(transposed=transposed, activation=activation, biased=True, experts=3, hidden=64, inner=128)
    x, (index, weights) = inputs(20, hidden=64), routing(20, 2, 3, seed=6)
    view, live = view_of(made.row([ON_HOST] * 3, {}, [], 0)), torch.tensor([20], device=DEVICE)
    window = group_pairs(index, live, view)
    prompt = replace(window, ticket=None, landing=None)
    biases = {"gate_up_bias": made.gate_up_bias, "down_bias": made.down_bias}
    outs = [
        routed_experts(x, groups, index, weights, live, view.done, made.shape, 3, block_rows=rows, **biases)
        for groups, rows in ((window, 16), (prompt, 64))
    ]
    if ON_GPU:
        assert torch.equal(*outs)
    torch.testing.assert_close(*outs)  # the interpreter's products of 16 and of 64 rows differ


@given(st.integers(1, 90), st.integers(1, 90))
def test_what_is_summed_takes_two_turns_at_least(hidden: int, inner: int) -> None:
    shape = ExpertShape(32 * hidden, 32 * inner, True, OAI)
    assert 2 * gate_up_launch(shape, 16).block_k <= shape.hidden
    assert 2 * down_launch(shape, 16).block_k <= shape.inner
    layout = RecordLayout((shape.hidden, 2 * shape.inner), (shape.inner, shape.hidden), True)
    if layout.fits_mxfp4:
        coded = replace(shape, form=WeightForm.MXFP4)
        assert TILE_COLUMNS <= gate_up_launch(coded, 16).block_k <= shape.hidden // 2
        assert TILE_COLUMNS <= down_launch(coded, 16).block_k <= shape.inner // 2


def test_choices_of_no_expert_add_nothing() -> None:
    made = bench(biased=True)
    x = inputs(4)
    index = torch.tensor([[0, 5], [-1, 2], [9, -1], [1, 3]], device=DEVICE)
    weights = torch.full((4, 2), 0.5, device=DEVICE)
    out = run(made, x, index, weights, 3, view_of(made.row([ON_HOST] * 5, {}, [], 0)))
    assert_close(out[:2], reference(made, x, index, weights, 3)[:2], 2)
    assert (out[2:] == 0).all()


@pytest.mark.skipif(ON_GPU, reason="in the interpreter a thread of the host plays the copy engine")
def test_an_expert_whose_copy_is_running_is_waited_for() -> None:
    made = bench(experts=2)
    x, index = inputs(2), torch.tensor([[0, 1], [1, 0]])
    weights = torch.ones(2, 2)
    view = view_of(made.row([3, ON_HOST], {0: 2}, [], 2))
    arrived: list[bool] = []

    def arrive() -> None:
        arrived.append(bool(made.held(2).isnan().all()))
        made.put(0, 2)
        view.done.fill_(3)

    copy = threading.Timer(0.5, arrive)
    copy.start()
    out = run(made, x, index, weights, 2, view)
    copy.join()
    assert arrived == [True]
    assert_close(out, reference(made, x, index, weights, 2), 2)


def test_a_tokens_experts_are_added_in_ascending_order_in_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens, top_k, hidden, experts = 5, 4, 1100, 6
    pairs = torch.randn(tokens * top_k, hidden, generator=generator).mul_(1e3).to(DEVICE)
    index, weights = routing(tokens, top_k, experts, seed=8)
    strided = torch.full((tokens, 2 * top_k), torch.nan, device=DEVICE)[:, ::2]
    strided.copy_(weights)
    expected = torch.zeros(tokens, hidden)
    for token in range(4):
        for k in index[token].argsort().tolist():
            expected[token] += float(weights[token, k]) * pairs[token * top_k + k].cpu()
    out = combine(pairs, index, strided, torch.tensor([4], device=DEVICE), experts, torch.float32).cpu()
    # a GPU fuses multiplications and additions, which shows where terms of 1e3 cancel
    torch.testing.assert_close(out, expected, rtol=2e-7, atol=1e-3 if ON_GPU else 0)
    if not ON_GPU:
        assert torch.equal(out, expected)
    backwards = sum(float(weights[0, k]) * pairs[k].cpu() for k in index[0].argsort().tolist()[::-1])
    assert not torch.equal(torch.as_tensor(backwards), expected[0])


def test_pairs_that_were_not_computed_do_not_reach_the_sum() -> None:
    pairs = torch.full((3 * 2, 33), torch.nan, device=DEVICE)
    pairs[1] = 2.0
    index = torch.tensor([[-1, 0], [4, 7], [0, 1]], device=DEVICE)
    live = torch.tensor([2], device=DEVICE)
    out = combine(pairs, index, torch.full((3, 2), 0.25, device=DEVICE), live, 4, torch.float16)
    assert (out[0] == 0.5).all() and (out[1:] == 0).all()
