"""What lies in words as integers of four bits, and beside them, is what was put there."""

from __future__ import annotations

import torch
from support.int4_models import packed

from localmoe.hub.safetensors_header import Packing
from localmoe.quant.int4 import zeros_of


def test_a_zero_point_of_0_borrows_of_its_neighbour() -> None:
    """GPTQModel takes one of each zero point in a word by one subtraction, and adds it so."""
    points = torch.randint(0, 16, (16, 40), generator=torch.Generator().manual_seed(1))
    points[:8, 0], points[8:, 0] = 0, torch.tensor([15, 0, 8, 8, 0, 15, 1, 0])
    words = packed(points.T) - 0x11111111
    assert torch.equal(zeros_of(words, Packing.COLUMNS, 1, 16, 40), points.to(torch.uint8))
