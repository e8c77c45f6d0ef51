"""Tensors move together, so that what was freed beside them can be given back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from localmoe.model import compaction
from localmoe.model.compaction import compact

MIB = 1 << 20
DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.uint8]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3), st.sampled_from(DTYPES)), max_size=20),
    st.integers(600, 40_000),
)
def test_tensors_move_with_their_views_and_nothing_keeps_what_they_were(
    kinds: list[tuple[int, int, torch.dtype]], block: int
) -> None:
    tensors: list[torch.Tensor] = []
    for size, views, dtype in kinds:
        whole = torch.arange(size).to(dtype)
        tensors.append(whole)
        tensors += [whole[number * size // 3 : (number + 1) * size // 3] for number in range(views)]
    large = torch.zeros(70 << 20, dtype=torch.uint8)
    part = torch.arange(100)[20:60]  # of what is not given
    stay = large.data_ptr(), part.data_ptr()
    before = [tensor.clone() for tensor in tensors]
    old = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_BLOCK_BYTES", block)
        compaction.move_together([*tensors, large, part, *tensors], lambda: None)
    assert all(map(torch.equal, tensors, before)) and stay == (large.data_ptr(), part.data_ptr())
    assert all(storage.expired() for storage in old)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.storage_offset() % 256 == 0)
    at = 0
    for size, views, _ in kinds:
        if views and size > 2:
            tensors[at].zero_()
            assert not any(view.any() for view in tensors[at + 1 : at + 1 + views])
        at += 1 + views
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    largest = max((size * dtype.itemsize for size, _, dtype in kinds), default=0)
    assert all(held <= max(block, largest + 511) for held in blocks.values())


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
