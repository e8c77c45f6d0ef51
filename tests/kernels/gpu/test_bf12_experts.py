"""Routed experts of records in BF12 give what they give of the same weights in 16 bits, wherever they are
read from, and a row's bits do not depend on what rides along. (Triton's interpreter multiplies the bits of
bfloat16 numbers, so the kernel of 16-bit weights is there to compare with on a GPU alone.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl
from dense_cases import DEVICE
from support.exact_weights import exact_int4, exact_nvfp4, fill_int4
from support.plain_groups import Row
from support.same_records import same_record
from test_routed_experts import view_of

from localmoe.experts.records import PackedMatrix, RecordLayout
from localmoe.kernels import bf12_tiles
from localmoe.kernels.activations import Activation
from localmoe.kernels.bf12_tiles import NOWHERE, Bf12Matrix
from localmoe.kernels.gpu import bf12_weights
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import ExpertShape, routed_experts
from localmoe.kernels.int4_tiles import Int4Matrix
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.nvfp4_tiles import Nvfp4Matrix
from localmoe.kernels.residency import ON_HOST
from localmoe.kernels.stage import StageView
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.float8 import decode_rows, values

ON_GPU = DEVICE.type == "cuda"
CLOSE = 4e-3 if ON_GPU else 1.6e-2  # Triton's interpreter rounds to bfloat16 by cutting off
IN_TILES = WeightForm.BF12, WeightForm.FP8, WeightForm.NVFP4, WeightForm.INT4, WeightForm.INT4_32
EXPERTS, ROOM = 4, 48  # bytes of a slot that no record fills


def awkward(rows: int, columns: int, chance: torch.Generator) -> Tensor:
    """bfloat16 weights, some of which 15 exponents leave out."""
    weights = torch.randn(rows, columns, generator=chance) / 8
    weights[3] *= 2.0**-9
    weights[5, ::2] = 0.0
    weights[7, 1] = 2.0**-40
    weights[8, 2] = -60.0  # a window that held it would leave others out
    weights[rows - 1, columns - 1] = 2.0**-17
    weights[rows - 1, 0] = -(2.0**-18)
    return weights.to(torch.bfloat16)


def put(to: Tensor, matrix: PackedMatrix, chance: torch.Generator, strays: bool) -> Tensor:
    """Weights of their own, and the same in 16 bits; what they are in float64."""
    rows, columns = matrix.rows, matrix.columns
    if isinstance(matrix, Bf12Matrix):
        weights = awkward(rows, columns, chance)
        to.copy_(weights if strays else weights.clamp(2.0**-7, 2.0))
        matrix.put(0, to)
        return to.double()
    if isinstance(matrix, Nvfp4Matrix):
        fours = torch.randint(0, 256, (rows, columns // 2), generator=chance).byte()
        beside = torch.rand(rows, columns // 16, generator=chance).mul_(40).to(torch.float8_e4m3fn)
        assert matrix.put(0, fours, beside.view(torch.uint8), 1 / 700)
        exact = exact_nvfp4(matrix)
        to.copy_(exact)
        return exact
    if isinstance(matrix, Int4Matrix):
        fill_int4(matrix, chance, 1 / 40)
        to.copy_(exact_int4(matrix))
        return exact_int4(matrix)
    codes = torch.randn(rows, columns, generator=chance).mul_(60).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(rows, -(-columns // 128), generator=chance) / 200
    assert matrix.put(0, codes, scales)
    to.copy_(decode_rows(codes, scales))
    return values()[codes.long()].double() * scales.double().repeat_interleave(128, 1)[:, :columns]


class Both:
    """Experts of one layer in both forms, on the host and in slots of their own."""

    def __init__(
        self, hidden: int, inner: int, strays: bool = True, gated: bool = True,
        form: WeightForm = WeightForm.BF12,
    ) -> None:  # fmt: skip
        chance = torch.Generator().manual_seed(3)
        height = 2 * inner if gated else inner
        shapes = (height, hidden), (hidden, inner)
        self.plain = RecordLayout(*shapes, transposed=False)
        self.packed = RecordLayout(*shapes, transposed=False, form=form)
        self.activation = Activation("relu", gated=gated)
        self.weights = torch.empty(EXPERTS, self.plain.elements, dtype=torch.bfloat16, pin_memory=ON_GPU)
        record_bytes = self.packed.num_bytes(torch.bfloat16)
        self.codes = torch.zeros(EXPERTS, record_bytes, dtype=torch.uint8, pin_memory=ON_GPU)
        self.exact: list[tuple[Tensor, Tensor]] = []
        for expert in range(EXPERTS):
            gate_up, down = self.plain.views(self.weights[expert])
            matrices = self.packed.packed_views(self.codes[expert])
            places = zip((*gate_up.split(inner), down), matrices, strict=True)
            *halves, last = [put(to, matrix, chance, strays) for to, matrix in places]
            self.exact.append((torch.cat(halves), last))
        biases = (torch.randn(EXPERTS, size, generator=chance) for size in (height, hidden))
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
        index = (chosen(tokens) if index is None else index).to(DEVICE)
        weights = torch.linspace(0.1, 1.0, 80).view(40, 2)[:tokens].to(DEVICE)
        live = torch.tensor([tokens], device=DEVICE)
        shape = ExpertShape(layout.hidden, layout.inner, layout.transposed, self.activation, layout.form)
        gate_up_bias, down_bias = self.biases
        return routed_experts(
            self.x[:tokens], group_pairs(index, live, view, lane, stage), index, weights, live, view.done,
            shape, EXPERTS, gate_up_bias=gate_up_bias, down_bias=down_bias, block_rows=block_rows, lane=lane,
        ).cpu()  # fmt: skip

    def reference(self, tokens: int) -> Tensor:
        """In float64, but for the product of gate and up, which is a bfloat16."""
        weights = torch.linspace(0.1, 1.0, 80).view(40, 2).double()
        outputs = torch.zeros(tokens, self.plain.hidden, dtype=torch.float64)
        for token, experts in enumerate(chosen(tokens).tolist()):
            for k, expert in enumerate(experts):
                outputs[token] += weights[token, k] * self.expert(expert, self.x[token : token + 1])[0]
        return outputs

    def expert(self, expert: int, x: Tensor) -> Tensor:
        """(T, H) of one expert, likewise."""
        gate_up, down = self.exact[expert]
        biases = [bias[expert].cpu().double() for bias in self.biases]
        gate, up = self.activation.split(x.cpu().double() @ gate_up.T + biases[0])
        inner = (gate.relu() * up).to(torch.bfloat16).double()
        return inner @ down.T + biases[1]


def chosen(tokens: int) -> Tensor:
    """Two experts a token."""
    chance = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, EXPERTS, generator=chance).argsort(dim=1)[:, :2]


SIZES = [(64, 128), (192, 64)]  # one step and several along each matrix
LARGER = [(320, 192), (2048, 1408)]  # of the same branches: for a GPU, as interpreting them takes long


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("hidden", "inner"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.gpu) for size in LARGER)]
)
def test_outputs_are_those_of_16_bit_weights(hidden: int, inner: int, gated: bool) -> None:
    made = Both(hidden, inner, gated=gated)
    for tokens in (1, 37):
        wanted = made.reference(tokens)
        found = [made.run(made.codes, made.packed, tokens, landing) for landing in ([], [1, 2], [3])]
        assert all(torch.equal(one, found[0]) for one in found)
        error = (found[0].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(error.max()) < CLOSE, error


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner"), [*SIZES, *LARGER])
def test_without_strays_the_bits_are_those_of_16_bit_weights(hidden: int, inner: int) -> None:
    made = Both(hidden, inner, strays=False)
    wanted = made.run(made.weights, made.plain, 5, [])
    assert torch.equal(made.run(made.codes, made.packed, 5, []), wanted)


def test_strays_alone() -> None:
    """Where x leaves of each matrix its strays alone, outputs are theirs."""
    made = Both(128, 64)
    for expert in range(EXPERTS):
        gate_up, down = made.plain.views(made.weights[expert])
        for weights in (gate_up[:64], gate_up[64:], down):
            weights[:] = 2.0**20
            weights[:, 1] = torch.linspace(-1, 1, len(weights))
            weights[2, 1] = 2.0**-30
        for to, matrix in zip(
            (gate_up[:64], gate_up[64:], down), made.packed.bf12_views(made.codes[expert]), strict=True
        ):
            to[4:, 1] = 2.0**19
            matrix.put(0, to)
            assert 2 <= int((matrix.places != NOWHERE).sum()) <= 4
        made.exact[expert] = gate_up.double(), down.double()
    made.x[:, 0], made.x[:, 2:] = 0, 0
    wanted, found = made.reference(3), made.run(made.codes, made.packed, 3, [])
    assert ((found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max() < CLOSE


@pytest.mark.parametrize("form", IN_TILES)
def test_a_rows_bits_do_not_depend_on_what_rides_along(form: WeightForm) -> None:
    made = Both(192, 128, form=form)
    index = torch.rand(40, EXPERTS, generator=torch.Generator().manual_seed(5)).argsort(dim=1)[:, :2]
    whole = made.run(made.codes, made.packed, 40, [], index)
    # NumPy's wider products depend on their height
    taller = ((40, 64), (16, 32), (1, 64)) if ON_GPU or form is WeightForm.BF12 else ()
    for rows, block_rows in ((17, 16), (9, 16), (1, 16), *taller):
        part = made.run(made.codes, made.packed, rows, [], index[:rows], block_rows=block_rows)
        assert torch.equal(part.view(torch.int16), whole[:rows].view(torch.int16)), (rows, block_rows)


@pytest.mark.parametrize("form", IN_TILES)
@pytest.mark.parametrize("gated", [True, False])
def test_what_is_read_from_the_host_lies_in_its_slot_afterwards(gated: bool, form: WeightForm) -> None:
    made = Both(192, 128, gated=gated, form=form)
    hosts = made.codes.clone()
    made.run(made.codes, made.packed, 12, [2, 1, 3])
    size = made.codes.shape[1]
    held = [made.slots[slot, :size].cpu() for slot in (1, 2, 3)]
    for record in made.codes[1:]:
        assert any(same_record(made.packed, record, slot) for slot in held)
    assert (made.slots[:, size:] == 255).all() and torch.equal(made.codes, hosts)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes, out, C: tl.constexpr, PTX: tl.constexpr
):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    for start in range(0, C, 64):
        here = codes + bf12_weights.code_places(n, C) + start * 6
        first, second = tl.load(here), tl.load(here + bf12_weights.SECOND)
        at = n[:, None] * C + start + tl.arange(0, 64)[None, :]
        upper = tl.load(here + bf12_weights.UPPER)
        tl.store(out + at, bf12_weights.decode(first, second, upper, 64, PTX))


@pytest.mark.parametrize("columns", [64, 192, 256])
def test_every_weight_of_a_window_is_decoded_exactly(columns: int) -> None:
    # all signs, codes and mantissas of a window that ends at 2^5: 2^-9 to 2^6
    exponents = torch.arange(-9, 6)
    mantissas = 1 + torch.arange(128) / 128
    each = (mantissas[None, :] * 2.0 ** exponents[:, None]).flatten()
    each = torch.cat((each, -each, torch.zeros(2)))
    rows = -(-len(each) // (columns - 1) // 16) * 16
    weights = torch.ones(rows, columns)
    weights[:, 0] = 60.0  # says where the window ends
    body = torch.ones(rows * (columns - 1))
    body[: len(each)] = each
    weights[:, 1:] = body.view(rows, columns - 1)
    stored = weights.to(torch.bfloat16)
    packed = torch.zeros(bf12_tiles.code_bytes(rows, columns), dtype=torch.uint8)
    side = torch.zeros(4 * bf12_tiles.side_words(rows, columns), dtype=torch.uint8)
    matrix = Bf12Matrix.at(packed, side, rows, columns)
    matrix.put(0, stored)
    assert (matrix.places == NOWHERE).all() and torch.equal(matrix.take(), stored)
    out = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    _decode_kernel[(rows // 16,)](packed.to(DEVICE).view(torch.int32), out, columns, ON_GPU)
    assert torch.equal(out.cpu().float() * matrix.scales[:, None], stored.float())
