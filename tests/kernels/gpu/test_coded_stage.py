"""Records of codes, in MXFP4 and in BF12, of which a part was copied ahead: the same bits, read from where
they are complete."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import test_bf12_experts as bf12
import test_mxfp4_experts as mxfp4
import torch
from support.plain_groups import Row
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE
from test_mxfp4_experts import OAI, SILU
from test_routed_experts import view_of

from localmoe.experts import stage_block as stage_module
from localmoe.experts.stage_block import StageBlock
from localmoe.kernels.gpu.copy_ahead import copy_ahead
from localmoe.kernels.gpu.foretelling import foretell
from localmoe.kernels.gpu.routed_experts import ExpertShape, gate_up_launch, stage_block
from localmoe.kernels.residency import ON_HOST
from localmoe.kernels.stage import NUMBER, NUMBER_SHIFT, PARTS, TURNS, StageView
from localmoe.kernels.weight_forms import WeightForm

EXPERTS, CHOSEN = 4, 2
INDEX = torch.tensor([[CHOSEN, 1], [3, CHOSEN], [1, 3]])


@dataclass(frozen=True)
class Case:
    """Experts of one form. inner: some blocks of the stage, and an odd number."""

    form: WeightForm
    hidden: int
    inner: int
    column_bytes: int  # of an inner column in the stage
    gated: bool = True

    def make(self) -> mxfp4.Both | bf12.Both:
        if self.form is WeightForm.MXFP4:
            return mxfp4.Both(self.hidden, self.inner, OAI)
        return bf12.Both(self.hidden, self.inner, gated=self.gated, form=self.form)

    @property
    def shape(self) -> ExpertShape:
        if self.form is WeightForm.MXFP4:
            return ExpertShape(self.hidden, self.inner, True, OAI, form=self.form)
        activation = replace(SILU, gated=self.gated)
        return ExpertShape(self.hidden, self.inner, False, activation, form=self.form)

    @property
    def block(self) -> int:
        return stage_block(self.shape)

    def spoil(self, made: mxfp4.Both | bf12.Both, first: int, columns: int) -> None:
        """Codes of gate's and up's rows of these inner columns of CHOSEN on the host become others, and what
        of MXFP4 is beside them."""
        record = made.codes[CHOSEN]
        if self.form is not WeightForm.MXFP4:
            for matrix in made.packed.packed_views(record)[:-1]:
                of_row = matrix.codes.numel() // matrix.rows
                matrix.codes.view(-1)[first * of_row : (first + columns) * of_row] ^= 0x11
            return
        gate_up = made.packed.mxfp4_views(record)[0]
        codes, scales = (part.clone() for part in gate_up.take())
        rows = slice(2 * first, 2 * (first + columns))
        codes[rows] ^= 255
        scales[rows] += 3
        gate_up.put(0, codes, scales)


CASES = [
    pytest.param(Case(WeightForm.MXFP4, 192, 192, 192 + 8 * 2), id="mxfp4"),
    pytest.param(Case(WeightForm.BF12, 128, 320, 2 * 128 * 12 // 8), id="bf12"),
    pytest.param(Case(WeightForm.BF12, 128, 320, 128 * 12 // 8, gated=False), id="ungated"),
    pytest.param(Case(WeightForm.FP8, 128, 320, 2 * 128), id="fp8"),
    pytest.param(Case(WeightForm.NVFP4, 128, 320, 2 * 64), id="nvfp4"),
    pytest.param(Case(WeightForm.INT4_32, 128, 320, 2 * 64), id="int4"),
    pytest.param(Case(WeightForm.BF12, 2048, 1408, 2 * 2048 * 12 // 8), id="qwen", marks=pytest.mark.gpu),
]


def fetched(case: Case, made: mxfp4.Both | bf12.Both, columns: int | None = None) -> StageView:
    """The stage once CHOSEN has been foretold and copied, as far as there is room."""
    block = case.block
    stage = StageBlock([made.packed], block, torch.bfloat16, DEVICE).view(0)
    assert stage is not None and stage.memory.dtype == torch.int32
    assert columns is None or stage.columns == columns
    homes = [record.data_ptr() for record in made.codes]
    row = view_of(Row(homes, homes, [ON_HOST] * EXPERTS, [torch.inf] * EXPERTS, [0] * 4, 0))
    foretell(torch.tensor([[CHOSEN]], device=DEVICE), torch.ones(1, 1, device=DEVICE), row, 0, stage=stage)
    copy_ahead(stage, row)
    number = int(stage.words[NUMBER])
    turns = [len(range(turn, stage.columns // block, TURNS)) for turn in range(TURNS) for _ in range(PARTS)]
    assert [int(word) - (number << NUMBER_SHIFT) if word else 0 for word in stage.progress] == turns
    return stage


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("landing", [[], [1, 2, 3]], ids=["passed by", "kept"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_complete_is_read_from_the_stage(case: Case, landing: list[int]) -> None:
    made = case.make()

    def outputs(stage: StageView | None) -> tuple[Tensor, Tensor]:
        made.slots.fill_(255)
        out = made.run(made.codes, made.packed, 3, landing, INDEX, stage=stage)
        return out, made.slots.clone()

    wanted, kept = outputs(None)
    stage = fetched(case, made)
    case.spoil(made, case.inner - stage.columns, stage.columns)  # nobody needs them any more
    assert not torch.equal(outputs(None)[0], wanted)
    out, slots = outputs(stage)
    assert torch.equal(out, wanted) and torch.equal(slots, kept)
    assert (slots != 255).any() == bool(landing)


@pytest.mark.parametrize("case", CASES)
def test_a_small_stage_holds_the_last_columns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    block = case.block
    monkeypatch.setattr(stage_module, "STAGE_BYTES", 2 * block * case.column_bytes + 99)
    made = case.make()
    wanted = made.run(made.codes, made.packed, 3, [], INDEX)
    stage = fetched(case, made, 2 * block)
    assert stage.memory.nbytes == 2 * block * case.column_bytes
    case.spoil(made, case.inner - 2 * block, 2 * block)
    assert torch.equal(made.run(made.codes, made.packed, 3, [], INDEX, stage=stage), wanted)
    case.spoil(made, case.inner - 3 * block, block)
    assert not torch.equal(made.run(made.codes, made.packed, 3, [], INDEX, stage=stage), wanted)


@pytest.mark.parametrize("case", CASES[:4])
def test_a_part_that_is_not_there_is_read_from_the_host(case: Case) -> None:
    made, block, inner = case.make(), case.block, case.inner
    wanted = made.run(made.codes, made.packed, 3, [], INDEX)
    stage = fetched(case, made, inner)
    stage.progress[3] -= 1  # of the first turn
    first = inner - (len(range(0, inner // block, TURNS)) - 1) * TURNS * block - block  # its last block
    case.spoil(made, first + block, inner - first - block)
    case.spoil(made, 0, first)
    assert torch.equal(made.run(made.codes, made.packed, 3, [], INDEX, stage=stage), wanted)
    case.spoil(made, first, block)
    assert not torch.equal(made.run(made.codes, made.packed, 3, [], INDEX, stage=stage), wanted)


def test_a_block_is_what_some_of_the_programs_read() -> None:
    for parameter in CASES:
        case = parameter.values[0]
        assert isinstance(case, Case)
        assert case.block > 0 and case.block % gate_up_launch(case.shape, 1).block_n == 0
    assert stage_block(ExpertShape(192, 192, True, SILU, form=WeightForm.MXFP4)) == 0, "not alternating"
