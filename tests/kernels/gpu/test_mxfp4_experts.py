"""Routed experts of records in MXFP4 give what they give of the same weights in 16 bits, wherever they are
read from, and a row's bits do not depend on what rides along."""

from __future__ import annotations

import math

import pytest
import torch
from support.plain_groups import Row
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl
from dense_cases import DEVICE
from test_routed_experts import view_of

from localmoe.experts.records import RecordLayout
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu import mxfp4_weights
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.mxfp4_weights import code_places, scale_places
from localmoe.kernels.gpu.routed_experts import ExpertShape, routed_experts
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.mxfp4_tiles import Mxfp4Matrix, code_bytes, scale_bytes
from localmoe.kernels.residency import ON_HOST
from localmoe.kernels.stage import StageView
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.mxfp4 import decode

ON_GPU = DEVICE.type == "cuda"
SILU = Activation("silu")
# Triton's interpreter multiplies the bits of bfloat16: equal bits in give equal ones out, but numbers so
# large that a limit would make one of all
OAI = Activation("swiglu_oai", 1.702, 7.0 if ON_GPU else math.inf, interleaved=True)
EXPERTS, ROOM = 4, 48  # bytes of a slot that no record fills


class Both:
    """Experts of one layer in both forms, on the host and in slots of their own."""

    def __init__(self, hidden: int, inner: int, activation: Activation) -> None:
        chance = torch.Generator().manual_seed(3)
        shapes = (hidden, 2 * inner), (inner, hidden)
        self.plain = RecordLayout(*shapes, transposed=True)
        self.packed = RecordLayout(*shapes, transposed=True, form=WeightForm.MXFP4)
        self.activation = activation
        self.weights = torch.empty(EXPERTS, self.plain.elements, dtype=torch.bfloat16, pin_memory=ON_GPU)
        self.codes = torch.zeros(EXPERTS, self.packed.mxfp4_bytes, dtype=torch.uint8, pin_memory=ON_GPU)
        for expert in range(EXPERTS):
            plain, packed = (
                self.plain.views(self.weights[expert]),
                self.packed.mxfp4_views(self.codes[expert]),
            )
            for to, matrix in zip(plain, packed, strict=True):
                blocks = torch.randint(
                    0, 256, (matrix.rows, matrix.columns // 2), dtype=torch.uint8, generator=chance
                )
                exponents = torch.randint(
                    110, 124, (matrix.rows, matrix.columns // 32), dtype=torch.uint8, generator=chance
                )
                matrix.put(0, blocks, exponents)
                to.copy_(decode(blocks.view(matrix.rows, -1, 16), exponents).T)
        biases = (torch.randn(EXPERTS, size, generator=chance) for size in (2 * inner, hidden))
        self.biases = [bias.to(DEVICE, torch.bfloat16) for bias in biases]
        self.x = torch.randn(40, hidden, generator=chance).to(DEVICE, torch.bfloat16)
        self.slots = torch.full((EXPERTS, self.codes.shape[1] + ROOM), 255, dtype=torch.uint8, device=DEVICE)

    def run(
        self,
        records: Tensor,
        layout: RecordLayout,
        tokens: int,
        landing: list[int],
        index: Tensor | None = None,
        block_rows: int = 16,
        lane: LaneView | None = None,
        stage: StageView | None = None,
    ) -> Tensor:
        """Outputs; expert 0 is in slot 0 if records are codes and anything may land."""
        addresses = [record.data_ptr() for record in records]
        tickets = [ON_HOST] * EXPERTS
        at = list(addresses)
        if landing:
            self.slots[0, : records.shape[1]].copy_(records[0])
            at[0], tickets[0] = self.slots[0].data_ptr(), 0
        free = [self.slots[slot].data_ptr() for slot in landing]
        view = view_of(Row(at, addresses, tickets, [torch.inf] * EXPERTS, free + [0] * (4 - len(free)), 0))
        if index is None:
            chance = torch.Generator().manual_seed(tokens)
            index = torch.rand(tokens, EXPERTS, generator=chance).argsort(dim=1)[:, :2]
        index = index.to(DEVICE)
        weights = torch.linspace(0.1, 1.0, 80).view(40, 2)[:tokens].to(DEVICE)
        live = torch.tensor([tokens], device=DEVICE)
        shape = ExpertShape(layout.hidden, layout.inner, layout.transposed, self.activation, layout.form)
        gate_up_bias, down_bias = self.biases
        return routed_experts(
            self.x[:tokens], group_pairs(index, live, view, lane, stage), index, weights, live, view.done,
            shape, EXPERTS, gate_up_bias=gate_up_bias, down_bias=down_bias, block_rows=block_rows, lane=lane,
        ).cpu()  # fmt: skip


# interpreting takes long: the kernel that knows the activation takes one step and several (of `hidden`) with
# each; the other one, which does not know it, takes several (of `inner`) once
SIZES = [(activation, *size) for activation in (SILU, OAI) for size in ((64, 128), (128, 192), (320, 128))]
INTERPRETED = [(SILU, 64, 128), (SILU, 320, 128), (OAI, 128, 192), (OAI, 320, 128)]
ELSEWHERE = [
    *(case for case in SIZES if case not in INTERPRETED),
    *((activation, 2880, 2880) for activation in (SILU, OAI)),
]


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    ("activation", "hidden", "inner"),
    [*INTERPRETED, *(pytest.param(*case, marks=pytest.mark.gpu) for case in ELSEWHERE)],
    ids=lambda value: value.kind if isinstance(value, Activation) else value,
)
def test_outputs_are_those_of_16_bit_weights(activation: Activation, hidden: int, inner: int) -> None:
    made = Both(hidden, inner, activation)
    # 64 columns are summed in two parts where weights have 16 bits; tensor cores add in an order of their own
    same_order = not ON_GPU and 64 not in (hidden, inner)
    for tokens in (1, 37):
        wanted = made.run(made.weights, made.plain, tokens, [])
        assert wanted.isfinite().all() and (wanted != 0).any()
        found = [made.run(made.codes, made.packed, tokens, landing) for landing in ([], [1, 2], [3])]
        assert all(torch.equal(one, found[0]) for one in found)
        if same_order:
            assert torch.equal(found[0], wanted)
        error = (found[0] - wanted).float().norm(dim=1) / wanted.float().norm(dim=1)
        assert float(error.max()) < 2e-3, error


@pytest.mark.parametrize("activation", [SILU, OAI], ids=lambda activation: activation.kind)
def test_a_rows_bits_do_not_depend_on_what_rides_along(activation: Activation) -> None:
    made = Both(192, 128, activation)
    index = torch.rand(40, EXPERTS, generator=torch.Generator().manual_seed(5)).argsort(dim=1)[:, :2]
    whole = made.run(made.codes, made.packed, 40, [], index)
    for rows, block_rows in ((40, 64), (17, 16), (16, 32), (9, 16), (1, 16), (1, 64)):
        part = made.run(made.codes, made.packed, rows, [], index[:rows], block_rows=block_rows)
        assert torch.equal(part.view(torch.int16), whole[:rows].view(torch.int16)), (rows, block_rows)


def test_what_is_read_from_the_host_lies_in_its_slot_afterwards() -> None:
    made = Both(192, 64, OAI)
    hosts = made.codes.clone()
    made.run(made.codes, made.packed, 12, [2, 1, 3])
    size = made.codes.shape[1]
    held = [made.slots[slot, :size].cpu() for slot in (1, 2, 3)]
    assert all(any(torch.equal(one, record) for one in held) for record in made.codes[1:])
    assert (made.slots[:, size:] == 255).all() and torch.equal(made.codes, hosts)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes, words, out, C: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr
):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    for start in range(0, C, BK):
        code = tl.load(codes + code_places(n, C, BK) + start * 2)
        word = tl.load(words + scale_places(n, C) + start // 128 * 16)
        at = n[:, None] * C + start + tl.arange(0, BK)[None, :]
        tl.store(out + at, mxfp4_weights.decode(code, word, start, BK, PTX))


@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (128, 128), (192, 64), (256, 64), (384, 128)])
def test_every_code_and_scale_is_decoded_exactly(columns: int, depth: int) -> None:
    rows, chance = 256, torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=chance)
    # Triton's interpreter knows no 16-bit numbers below 2^-126, and raises where one overflows
    each = torch.arange(rows).clamp(*((0, 254) if ON_GPU else (4, 252))).to(torch.uint8)
    scales = each[:, None].repeat(1, columns // 32)
    scales[:, 1::2] = scales[:, 1::2].flip(0)
    packed = torch.zeros(code_bytes(rows, columns), dtype=torch.uint8)
    powers = torch.zeros(scale_bytes(rows, columns), dtype=torch.uint8)
    matrix = Mxfp4Matrix.at(packed, powers, rows, columns)
    for first in (0, 48):
        end = 48 if first == 0 else rows
        matrix.put(first, codes[first:end], scales[first:end])
    assert all(torch.equal(a, b) for a, b in zip(matrix.take(), (codes, scales), strict=True))
    out = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    places = [tensor.flatten().to(DEVICE) for tensor in (matrix.codes, matrix.scales)]
    words = [place.view(torch.int32) for place in places]
    _decode_kernel[(rows // 16,)](*words, out, columns, depth, ON_GPU)
    wanted = decode(codes.view(rows, -1, 16), scales)
    assert torch.equal(out.cpu().view(torch.int16), wanted.view(torch.int16))
