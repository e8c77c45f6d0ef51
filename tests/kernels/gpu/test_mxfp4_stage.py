"""Records in MXFP4 of which a part was copied ahead: the same bits, read from where they are complete."""

from __future__ import annotations

import pytest
import torch
from support.plain_groups import Row
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE
from test_mxfp4_experts import EXPERTS, OAI, SILU, Both
from test_routed_experts import view_of

from localmoe.experts import stage_block as stage_module
from localmoe.experts.stage_block import StageBlock
from localmoe.kernels.gpu.copy_ahead import copy_ahead
from localmoe.kernels.gpu.foretelling import foretell
from localmoe.kernels.gpu.routed_experts import ExpertShape, stage_block
from localmoe.kernels.residency import ON_HOST
from localmoe.kernels.stage import NUMBER, NUMBER_SHIFT, PARTS, TURNS, StageView
from localmoe.kernels.weight_forms import WeightForm

HIDDEN, INNER, CHOSEN = 192, 192, 2
INDEX = torch.tensor([[CHOSEN, 1], [3, CHOSEN], [1, 3]])
BLOCK = stage_block(ExpertShape(HIDDEN, INNER, True, OAI, form=WeightForm.MXFP4))


def fetched(made: Both, columns: int = INNER) -> StageView:
    """The stage once CHOSEN has been foretold and copied, as far as there is room."""
    stage = StageBlock([made.packed], BLOCK, torch.bfloat16, DEVICE).view(0)
    assert stage is not None and stage.columns == columns and stage.memory.dtype == torch.int32
    homes = [record.data_ptr() for record in made.codes]
    row = view_of(Row(homes, homes, [ON_HOST] * EXPERTS, [torch.inf] * EXPERTS, [0] * 4, 0))
    foretell(torch.tensor([[CHOSEN]], device=DEVICE), torch.ones(1, 1, device=DEVICE), row, 0, stage=stage)
    copy_ahead(stage, row)
    number = int(stage.words[NUMBER])
    turns = [len(range(turn, columns // BLOCK, TURNS)) for turn in range(TURNS) for _ in range(PARTS)]
    assert [int(word) - (number << NUMBER_SHIFT) if word else 0 for word in stage.progress] == turns
    return stage


def spoil(made: Both, first: int, columns: int) -> None:
    """Gate's and up's rows of these inner columns of CHOSEN on the host become something else."""
    gate_up = made.packed.mxfp4_views(made.codes[CHOSEN])[0]
    codes, scales = (part.clone() for part in gate_up.take())
    rows = slice(2 * first, 2 * (first + columns))
    codes[rows] ^= 255
    scales[rows] += 3
    gate_up.put(0, codes, scales)


@pytest.mark.parametrize("landing", [[], [1, 2, 3]], ids=["passed by", "kept"])
def test_what_is_complete_is_read_from_the_stage(landing: list[int]) -> None:
    made = Both(HIDDEN, INNER, OAI)

    def outputs(stage: StageView | None) -> tuple[Tensor, Tensor]:
        made.slots.fill_(255)
        out = made.run(made.codes, made.packed, 3, landing, INDEX, stage=stage)
        return out, made.slots.clone()

    wanted, kept = outputs(None)
    stage = fetched(made)
    spoil(made, 0, INNER)  # nobody needs them any more
    assert not torch.equal(outputs(None)[0], wanted)
    out, slots = outputs(stage)
    assert torch.equal(out, wanted) and torch.equal(slots, kept)
    assert (slots != 255).any() == bool(landing)


def test_a_small_stage_holds_the_last_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    column = HIDDEN + 8 * 2  # bytes: codes of two rows, and two words of scales for each
    monkeypatch.setattr(stage_module, "STAGE_BYTES", 2 * BLOCK * column + 99)
    made = Both(HIDDEN, INNER, OAI)
    wanted = made.run(made.codes, made.packed, 3, [], INDEX)
    stage = fetched(made, 2 * BLOCK)
    assert stage.memory.nbytes == 2 * BLOCK * column
    spoil(made, INNER - 2 * BLOCK, 2 * BLOCK)
    assert torch.equal(made.run(made.codes, made.packed, 3, [], INDEX, stage=stage), wanted)
    spoil(made, INNER - 3 * BLOCK, BLOCK)
    assert not torch.equal(made.run(made.codes, made.packed, 3, [], INDEX, stage=stage), wanted)


def test_a_part_that_is_not_there_is_read_from_the_host() -> None:
    made = Both(HIDDEN, INNER, OAI)
    wanted = made.run(made.codes, made.packed, 3, [], INDEX)
    stage = fetched(made)
    stage.progress[3] -= 1  # of the first turn, whose last block is the third from the first one
    first = INNER - (len(range(0, INNER // BLOCK, TURNS)) - 1) * TURNS * BLOCK - BLOCK
    spoil(made, first + BLOCK, INNER - first - BLOCK)
    spoil(made, 0, first)
    assert torch.equal(made.run(made.codes, made.packed, 3, [], INDEX, stage=stage), wanted)


def test_rows_that_do_not_alternate_have_no_stage() -> None:
    assert BLOCK > 0 and stage_block(ExpertShape(HIDDEN, INNER, True, SILU, form=WeightForm.MXFP4)) == 0
