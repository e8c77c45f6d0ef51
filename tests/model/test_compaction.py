"""Tensors move together, so that what was freed beside them can be given back."""

from __future__ import annotations

import pytest
import torch

from localmoe.model.compaction import compact

MIB = 1 << 20


def test_on_a_cpu_everything_stays_where_it_is() -> None:
    tensor = torch.arange(5)
    place = tensor.data_ptr()
    compact([tensor])
    assert tensor.data_ptr() == place and tensor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [1, 3, 9, 12])
def test_holes_are_given_back_and_values_stay(mib: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    blocks = [torch.empty(18 * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
    del blocks  # cached: what comes next is put into them
    kept, freed = [], []
    for number in range(10):
        kept.append(torch.full((mib * MIB,), number, dtype=torch.uint8, device="cuda"))
        freed.append(torch.empty((18 - mib) * MIB, dtype=torch.uint8, device="cuda"))
    whole = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    view = whole[: 2 * MIB]
    place = view.data_ptr()
    del freed
    compact([*kept, view])
    assert view.data_ptr() == place, "it would not be a view any more"
    assert [int(tensor[-1]) for tensor in kept] == list(range(10))
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(kept))
    in_blocks = -(-10 * mib // 20) * 20 if mib < 10 else 10 * mib  # six of 3 MiB share a block of 20
    assert torch.cuda.memory_reserved() - before <= (in_blocks + 40) * MIB  # instead of 200
