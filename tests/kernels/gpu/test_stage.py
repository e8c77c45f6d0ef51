"""Weights that are copied ahead: the same bits, read from where they are complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE, DTYPES
from test_routed_experts import OAI, SILU, UNGATED, Bench, inputs, routing, view_of

from localmoe.experts import stage_block as stage_module
from localmoe.experts.records import RecordLayout
from localmoe.experts.stage_block import StageBlock
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.copy_ahead import copy_ahead
from localmoe.kernels.gpu.foretelling import foretell
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import ExpertShape, routed_experts, stage_block
from localmoe.kernels.mailbox import LAYER_SHIFT, NOBODY
from localmoe.kernels.residency import ON_HOST
from localmoe.kernels.stage import BEGUN, NUMBER, NUMBER_SHIFT, PARTS, PLACE, TURNS, StageView

HIDDEN, INNER, EXPERTS, LAYER = 128, 160, 6, 1
SHAPE = ExpertShape(HIDDEN, INNER, False, SILU)
BLOCK = stage_block(SHAPE)
CHOSEN = int(routing(1, 3, EXPERTS)[0][0, 0])  # by the first token, and by others


class Rig:
    """A layer all of whose experts are missing, and its stage."""

    def __init__(self, dtype: torch.dtype = DTYPES[0], *, gated: bool = True) -> None:
        layout = RecordLayout(((2 if gated else 1) * INNER, HIDDEN), (HIDDEN, INNER), False)
        self.shape = SHAPE if gated else replace(SHAPE, activation=UNGATED)
        host = torch.zeros(EXPERTS, layout.elements, dtype=dtype, pin_memory=DEVICE.type == "cuda")
        host.copy_(torch.randn(host.shape, generator=torch.Generator().manual_seed(0)) * HIDDEN**-0.5)
        arena = torch.full((4, layout.elements), torch.nan, dtype=dtype, device=DEVICE)
        self.made = Bench(self.shape, layout, host, arena, None, None)
        self.block = StageBlock([layout] * 2, BLOCK, dtype, DEVICE)
        self.stage = self.view()

    def view(self) -> StageView:
        view = self.block.view(LAYER)
        assert view is not None
        return view

    def fetch(self, expert: int) -> None:
        """Foretell an expert of the layer, and copy it as far as there is room."""
        row = self.made.row([ON_HOST] * EXPERTS, {}, [], 0)
        index, weights = torch.tensor([[expert]], device=DEVICE), torch.ones(1, 1, device=DEVICE)
        foretell(index, weights, view_of(row), LAYER, stage=self.stage)
        copy_ahead(self.stage, view_of(row))

    def run(self, tokens: int, stage: StageView | None, landing: list[int]) -> Tensor:
        view = view_of(self.made.row([ON_HOST] * EXPERTS, {}, landing, 0))
        index, weights = routing(tokens, 3, EXPERTS)
        live = torch.tensor([tokens], device=DEVICE)
        x = inputs(tokens, self.made.host.dtype, HIDDEN)
        groups = group_pairs(index, live, view, None, stage)
        out = routed_experts(x, groups, index, weights, live, view.done, self.shape, EXPERTS)
        return out.cpu()

    def columns(self, of: Tensor, first: int, columns: int, inner: int) -> None:
        """Make gate's and up's rows from `first` on no numbers."""
        matrices = 2 if self.shape.activation.gated else 1
        rows = of[: matrices * inner * HIDDEN].view(matrices, inner, HIDDEN)
        rows[:, first : first + columns] = torch.nan


def copied(stage: StageView) -> list[int]:
    """Blocks that each program has copied since the last word."""
    number = int(stage.words[NUMBER])
    return [
        int(word) - (number << NUMBER_SHIFT) if int(word) >> NUMBER_SHIFT == number else 0
        for word in stage.progress
    ]


@pytest.mark.parametrize("landing", [[], [0, 1, 3]], ids=["passed by", "kept"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize(("dtype", "gated"), [*((dtype, True) for dtype in DTYPES), (DTYPES[0], False)])
def test_what_is_complete_is_read_from_the_stage(
    dtype: torch.dtype, gated: bool, tokens: int, landing: list[int]
) -> None:
    rig = Rig(dtype, gated=gated)
    wanted = rig.run(tokens, None, landing)
    kept = rig.made.arena.clone()
    rig.made.arena.fill_(torch.nan)
    rig.fetch(CHOSEN)
    blocks = INNER // BLOCK
    assert copied(rig.stage) == [
        len(range(turn, blocks, TURNS)) for turn in range(TURNS) for _ in range(PARTS)
    ]
    rig.columns(rig.made.host[CHOSEN], 0, INNER, INNER)  # nobody needs them any more
    assert torch.equal(rig.run(tokens, rig.stage, landing), wanted)
    assert torch.equal(rig.made.arena.nan_to_num(7), kept.nan_to_num(7)), "slots get what was read"
    assert rig.stage.staged.tolist() == [CHOSEN, int(rig.stage.words[NUMBER])]


@pytest.mark.parametrize("turn", range(TURNS))
def test_a_block_counts_once_all_of_its_parts_are_there(turn: int) -> None:
    rig = Rig()
    wanted = rig.run(5, None, [])
    rig.fetch(CHOSEN)
    at = turn * PARTS + 3
    rig.stage.progress[at] -= 1  # the last block of this turn
    last = len(range(turn, INNER // BLOCK, TURNS)) - 1
    first = INNER - (last * TURNS + turn + 1) * BLOCK
    rig.columns(rig.stage.memory, first, BLOCK, INNER)
    assert torch.equal(rig.run(5, rig.stage, []), wanted)
    for begin in range(0, INNER, BLOCK):
        if begin != first:
            rig.columns(rig.made.host[CHOSEN], begin, BLOCK, INNER)
    assert torch.equal(rig.run(5, rig.stage, []), wanted), "all others are read from the stage"


def test_a_small_stage_holds_the_last_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "STAGE_BYTES", 3 * BLOCK * HIDDEN * 4 + 99)
    rig = Rig()
    wanted = rig.run(5, None, [])
    assert rig.stage.columns == 3 * BLOCK < INNER
    rig.fetch(CHOSEN)
    rig.columns(rig.made.host[CHOSEN], INNER - 3 * BLOCK, 3 * BLOCK, INNER)
    assert torch.equal(rig.run(5, rig.stage, []), wanted)


def spoil(rig: Rig, how: str) -> None:
    if how == "another expert":
        rig.fetch((CHOSEN + 1) % EXPERTS)
        rig.stage.words[PLACE] = (LAYER << LAYER_SHIFT) | NOBODY
    elif how == "another layer":
        rig.stage.words[PLACE] = (0 << LAYER_SHIFT) | CHOSEN
    elif how == "said again":
        rig.stage.words[NUMBER] += 1


@pytest.mark.parametrize("how", ["another expert", "another layer", "said again"])
def test_nothing_else_is_read_from_the_stage(how: str) -> None:
    rig = Rig()
    wanted = rig.run(5, None, [])
    rig.fetch(CHOSEN)
    spoil(rig, how)
    rig.stage.memory.fill_(torch.nan)
    assert torch.equal(rig.run(5, rig.stage, []), wanted)


def test_copying_ends_when_the_layer_begins() -> None:
    rig = Rig()
    rig.fetch(CHOSEN)
    rig.run(1, rig.stage, [])
    assert rig.stage.words[BEGUN] == rig.stage.words[NUMBER] == 1
    rig.stage.progress.zero_()
    row = view_of(rig.made.row([ON_HOST] * EXPERTS, {}, [], 0))
    copy_ahead(rig.stage, row)
    assert not any(copied(rig.stage))
    rig.stage.words[PLACE] = -1
    rig.stage.words[NUMBER] += 1
    copy_ahead(rig.stage, row)
    assert not any(copied(rig.stage)), "nobody was named"


@pytest.mark.parametrize(
    "changed",
    [
        lambda shape: replace(shape, transposed=True),
        lambda shape: replace(shape, activation=OAI),
        lambda shape: replace(shape, hidden=33),
    ],
)
def test_records_in_other_pieces_have_no_stage(changed: Callable[[ExpertShape], ExpertShape]) -> None:
    assert BLOCK > 0 and stage_block(replace(SHAPE, activation=Activation("gelu_tanh"))) == BLOCK
    assert stage_block(changed(SHAPE)) == 0


def test_layers_of_other_widths_have_none() -> None:
    layouts = [RecordLayout((2 * inner, HIDDEN), (HIDDEN, inner), False) for inner in (INNER, INNER + 1)]
    block = StageBlock(layouts, BLOCK, DTYPES[0], DEVICE)
    assert block.view(0) is not None and block.view(1) is None
    assert block.num_bytes == 2 * INNER * HIDDEN * 2 <= stage_module.STAGE_BYTES


def named(rig: Rig, index: list[int], weights: list[float], tickets: list[int]) -> int:
    row = rig.made.row(tickets, {e: 0 for e in range(EXPERTS) if tickets[e] == 0}, [], 0)
    given = torch.tensor([weights], device=DEVICE, dtype=DTYPES[0])
    foretell(torch.tensor([index], device=DEVICE), given, view_of(row), LAYER, stage=rig.stage)
    word = int(rig.stage.words[PLACE])
    assert word == -1 or word >> LAYER_SHIFT == LAYER
    return word if word == -1 else word & NOBODY


def test_the_link_is_told_the_likeliest_that_is_missing() -> None:
    rig, missing = Rig(), [ON_HOST] * EXPERTS
    assert named(rig, [0, 3, 5], [0.2, 0.5, 0.3], missing) == 3
    assert named(rig, [0, 3, 5], [0.2, 0.5, 0.3], [ON_HOST] * 3 + [0] * 3) == 0
    assert named(rig, [0, 3, 5], [0.2, 0.5, 0.3], [0] * EXPERTS) == -1
    assert named(rig, [-1, EXPERTS], [0.5, 0.5], missing) == -1
    assert int(rig.stage.words[NUMBER]) == 4
