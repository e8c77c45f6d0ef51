"""What a copy takes: measured where there is a link."""

from __future__ import annotations

import pytest
import torch

from localmoe.experts.link_speed import measure_copy_s
from localmoe.experts.slots import DeviceSlots


def test_a_cpu_has_no_link_and_its_slots_are_left_alone() -> None:
    slots = DeviceSlots(2, 8, torch.float32, torch.device("cpu"))
    slots._arena.fill_(7.0)
    assert measure_copy_s(torch.ones(8), slots) is None
    assert bool((slots._arena == 7.0).all())


@pytest.mark.gpu
def test_a_copy_takes_its_bytes_over_a_rate_that_links_have() -> None:
    slots = DeviceSlots(2, 4 << 20, torch.bfloat16, torch.device("cuda"))
    record = torch.ones(4 << 20, dtype=torch.bfloat16).pin_memory()
    copy_s = measure_copy_s(record, slots)
    assert copy_s is not None and 1e9 < record.numel() * 2 / copy_s < 2e11
    assert bool((slots._arena[0] == 1).all())
