"""The table on the device shows what the host last uploaded, layer by layer, and a kernel can read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from localmoe.experts.residency_block import LANDING_SLOTS, ResidencyBlock
from localmoe.kernels.residency import ON_HOST

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


Table = tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def table(seed: int, layers: int, experts: int) -> Table:
    """What is uploaded: here, slots, tickets, landing, scores."""
    numbers, shape = np.random.default_rng(seed), (layers, experts)
    scores = numbers.random(shape).astype(np.float32)
    scores[0, 0] = np.inf
    return (
        numbers.random(shape) < 0.5, numbers.integers(1, 2**62, shape), numbers.integers(0, 2**40, shape),
        numbers.integers(0, 2**62, (layers, LANDING_SLOTS)), scores,
    )  # fmt: skip


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (3, 5), (2, 8), (1, 7)])  # also odd numbers of cells
def test_a_layer_shows_what_was_uploaded_last(layers: int, experts: int) -> None:
    block = ResidencyBlock(layers, experts, DEVICE)
    home = np.random.default_rng(9).integers(1, 2**62, (layers, experts))
    block.settle(home)
    for seed in range(3):
        here, slots, tickets, landing, scores = table(seed, layers, experts)
        block.upload(here, slots, tickets, landing, scores)
        expected = {
            "address": np.where(here, slots, home), "ticket": np.where(here, tickets, ON_HOST),
            "landing": landing, "score": scores, "home": home,
        }  # fmt: skip
        for layer in range(layers):
            view = block.view(layer)
            for name, values in expected.items():
                assert np.array_equal(getattr(view, name).cpu().numpy(), values[layer]), name
            assert view.score.dtype == torch.float32 and view.address.dtype == torch.int64


def test_scores_are_uploaded_alone_while_the_rest_stays_as_passes_left_it() -> None:
    block = ResidencyBlock(2, 3, DEVICE)
    block.upload(*table(1, 2, 3))
    block.view(0).address.fill_(5)
    for score in (2.0, 3.0, 4.0):
        block.upload_scores(np.full((2, 3), score, dtype=np.float32))
        assert block.view(1).score.tolist() == [score] * 3
        assert block.view(0).address.tolist() == [5] * 3


def test_layers_share_the_number_of_the_last_copy_and_have_logs_of_their_own() -> None:
    block = ResidencyBlock(2, 3, DEVICE)
    block.done.fill_(7)
    block.view(1).log.fill_(5)
    assert block.view(0).done.tolist() == block.view(1).done.tolist() == [7]
    assert block.log.tolist() == [[0, 0, 0], [5, 5, 5]]
    assert block.log.dtype == torch.int32


def test_its_size_is_that_of_its_tensors_on_the_device() -> None:
    block = ResidencyBlock(3, 5, DEVICE)
    cells, landing = 15, 3 * LANDING_SLOTS
    assert block.num_bytes == 8 * (3 * cells + landing + 8) + 4 * cells + 8  # scores: 15 in 8 pairs


def test_the_kernel_finds_in_it_what_the_host_wrote() -> None:
    pytest.importorskip("triton")
    from support.plain_groups import Row, plain_groups

    from localmoe.kernels.gpu.grouping import group_pairs

    block = ResidencyBlock(3, 5, DEVICE)
    address, tickets, scores = [8, 32, 48, 8, 8], [-1, 0, 2, -1, -1], [0.0, 3.0, 1.0, 0.0, 0.0]
    block.settle(np.full((3, 5), 8))
    block.done.fill_(2)
    landing = np.zeros((3, LANDING_SLOTS), dtype=np.int64)
    landing[1, 0] = 96
    rows = [np.tile(np.array(row), (3, 1)) for row in (address, tickets, scores)]
    block.upload(rows[1] >= 0, rows[0], rows[1], landing, rows[2].astype(np.float32))
    index = [[0, 3], [4, 0]]
    groups = group_pairs(torch.tensor(index, device=DEVICE), torch.tensor([2], device=DEVICE), block.view(1))
    row = Row(address, [8] * 5, tickets, scores, [96], 2)
    tiles, log = plain_groups(index, 2, row)
    assert block.log.tolist() == [[0] * 5, log, [0] * 5]
    assert groups.landing.tolist()[: len(tiles)] == [tile.landing for tile in tiles] == [96, 48, 32]
