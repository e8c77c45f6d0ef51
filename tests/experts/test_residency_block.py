"""The table on the device shows what the host last uploaded, layer by layer, and a kernel can read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localmoe.experts.residency_block import LANDING_SLOTS, ResidencyBlock

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (3, 5), (2, 8), (1, 7)])  # also odd numbers of cells
def test_a_layer_shows_what_was_uploaded_and_nothing_later(layers: int, experts: int) -> None:
    block = ResidencyBlock(layers, experts, DEVICE)
    numbers = np.random.default_rng(0)
    uploaded = {
        "address": numbers.integers(1, 2**62, (layers, experts)),
        "ticket": numbers.integers(-1, 2**40, (layers, experts)),
        "landing": numbers.integers(0, 2**62, (layers, LANDING_SLOTS)),
        "score": numbers.random((layers, experts)).astype(np.float32),
    }
    uploaded["score"][0, 0] = np.inf
    for name, values in uploaded.items():
        getattr(block, name)[:] = values
    block.upload()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for name in uploaded:
        getattr(block, name)[:] = 1  # prepared for the next pass
    for layer in range(layers):
        view = block.view(layer)
        for name, values in uploaded.items():
            assert np.array_equal(getattr(view, name).cpu().numpy(), values[layer]), name
        assert view.score.dtype == torch.float32 and view.address.dtype == torch.int64


def test_scores_are_uploaded_alone_and_the_two_places_on_the_host_take_turns() -> None:
    block = ResidencyBlock(2, 3, DEVICE)
    block.address[:], block.score[:] = 5, 1.0
    block.upload()
    for score in (2.0, 3.0, 4.0):
        block.address[:], block.score[:] = 9, score
        block.upload_scores()
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
    address, tickets, scores = [16, 32, 48, 64, 80], [-1, 0, 2, -1, -1], [0.0, 3.0, 1.0, 0.0, 0.0]
    block.address[1], block.ticket[1], block.score[1] = address, tickets, scores
    block.landing[1, 0] = 96
    block.done.fill_(2)
    block.upload()
    index = [[0, 3], [4, 0]]
    groups = group_pairs(torch.tensor(index, device=DEVICE), torch.tensor([2], device=DEVICE), block.view(1))
    row = Row(address, [0] * 5, tickets, scores, [96], 2)
    tiles, log = plain_groups(index, 2, row)
    assert block.log.tolist() == [[0] * 5, log, [0] * 5]
    assert groups.landing.tolist()[: len(tiles)] == [tile.landing for tile in tiles] == [96, 48, 32]
