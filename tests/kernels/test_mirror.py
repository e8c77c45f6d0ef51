"""Words on the device are those of the last upload, also while expert copies keep the copy engine busy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localmoe.kernels.mirror import Mirror

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("count", [1, 3, 256, 1000])
def test_the_device_shows_what_was_uploaded_and_nothing_later(count: int) -> None:
    mirror = Mirror(count, DEVICE)
    values = np.random.default_rng(count).integers(-(2**63), 2**63, count)
    mirror.host[:] = values
    whole = mirror.upload()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    mirror.host[:] = 1
    assert mirror.words.tolist() == whole.tolist() == values.tolist()


@pytest.mark.parametrize("places", [2, 4])
def test_the_next_words_can_be_written_while_the_last_ones_are_still_to_be_taken(places: int) -> None:
    mirror = Mirror(4, DEVICE, places)
    seen, taken = [], []
    for i in range(9):
        if i % places == 0 and DEVICE.type == "cuda":
            torch.cuda.synchronize()  # so that all places are free
        taken.append(mirror.host)
        taken[-1][:] = i
        mirror.upload()
        assert not any(np.shares_memory(mirror.host, earlier) for earlier in taken[1 - places :])
        seen.append(mirror.words.clone())
    assert [words.tolist() for words in seen] == [[i] * 4 for i in range(9)]
    assert np.shares_memory(mirror.host, mirror.stages[9 % places]) and mirror.stages.shape == (places, 4)


def test_a_part_is_uploaded_alone() -> None:
    mirror = Mirror(10, DEVICE)
    mirror.host[:] = range(10)
    assert mirror.upload(3, 5).tolist() == [3, 4]
    assert mirror.words.tolist() == [0, 0, 0, 3, 4, 0, 0, 0, 0, 0]
    assert mirror.upload(5, 5).tolist() == []


@pytest.mark.gpu
def test_an_upload_does_not_wait_for_copies_on_another_stream() -> None:
    mirror = Mirror(5000, DEVICE)
    weights = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    slots = torch.empty(16, weights.numel(), dtype=torch.uint8, device=DEVICE)
    mirror.upload()  # compiled
    torch.cuda.synchronize()
    stream, last, uploaded = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        for slot in slots:
            slot.copy_(weights, non_blocking=True)
        last.record()
    mirror.host[:] = range(5000)
    mirror.upload()
    uploaded.record()
    uploaded.synchronize()
    assert not last.query()  # 1 GiB takes some 20 ms
    assert mirror.words.tolist() == list(range(5000))
