"""What the CPU lane is told ahead, from routers that are told what to answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from localmoe.experts.lane_block import LaneBlock
from localmoe.kernels.mailbox import LAYER_SHIFT, NOBODY, Mailbox, MailboxLayout
from localmoe.kernels.residency import ON_HOST, ResidencyView
from localmoe.model.device_foresight import Foresight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, TOP_K, HIDDEN = 8, 2, 16


class Rig:
    """A mailbox nobody answers, and a layer of which the experts 2, 3 and 6 are missing."""

    def __init__(self) -> None:
        layout = MailboxLayout(4, TOP_K, EXPERTS, HIDDEN)
        self.box = Mailbox(layout, torch.bfloat16, pinned=DEVICE.type == "cuda")
        self.block = LaneBlock(self.box, [32, 32], [16, 16], EXPERTS, DEVICE)
        cells = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
        ticket = cells.clone()
        ticket[[2, 3, 6]] = ON_HOST
        numbers = torch.zeros(EXPERTS, device=DEVICE)
        self.view = ResidencyView(cells, cells, ticket, numbers, cells, cells[:1], cells.int())
        self.seen: list[Tensor] = []

    def gate(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(hidden)
        index = torch.tensor([[1, 6]] * len(hidden), device=DEVICE)
        return torch.full_like(index, 0.5, dtype=torch.bfloat16), index

    def told(self, foresight: Foresight, layer: int, rows: int, forced: Tensor | None = None) -> int | None:
        """The expert of layer 1, or None where nothing is told."""
        self.box.foretold[0] = NOBODY
        hidden = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        foresight.begin()
        foresight.tell(layer, hidden, self.view, self.block.view(0), forced)
        foresight.use_link()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        word = int(self.box.foretold[0])
        return word & NOBODY if word >> LAYER_SHIFT else None


def test_the_next_layers_router_names_what_is_missing() -> None:
    rig = Rig()
    foresight = Foresight([None, rig.gate], DEVICE)
    assert rig.told(foresight, 1, 1) == 6
    assert len(rig.seen) == 1 and rig.seen[0].shape == (1, HIDDEN)
    assert rig.told(foresight, 1, 1, torch.tensor([[3, 0]], device=DEVICE)) == 3, "a simulation's word counts"
    assert rig.told(foresight, 1, 1, torch.tensor([[0, 1]], device=DEVICE)) == NOBODY


def test_nothing_is_told_without_a_router() -> None:
    rig = Rig()
    assert rig.told(Foresight([rig.gate, None], DEVICE), 1, 1) is None
    assert rig.told(Foresight([rig.gate], DEVICE), 1, 1) is None
    assert not rig.seen
