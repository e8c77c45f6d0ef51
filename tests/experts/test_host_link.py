"""The link of a machine without a GPU: an emulated speed is kept by each copy and in the long run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from localmoe.experts.link import HostLink
from localmoe.experts.slots import DeviceSlots


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A copy shared out among threads that other programs keep waiting takes many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def record_of(num_bytes: int) -> tuple[Tensor, DeviceSlots]:
    return torch.ones(num_bytes // 4), DeviceSlots(2, num_bytes // 4, torch.float32, torch.device("cpu"))


def timed(link: HostLink, record: Tensor, slots: DeviceSlots, copies: int) -> float:
    started = time.perf_counter()
    for _ in range(copies):
        link.copy(record, slots, 1)
    return time.perf_counter() - started


@pytest.mark.parametrize("speed", [None, 1e9])
def test_the_record_is_in_the_slot_when_the_copy_returns(speed: float | None) -> None:
    record, slots = record_of(4096)
    link = HostLink(speed)
    for value in (1.0, -2.5):
        link.copy(record * value, slots, 1)
        assert torch.equal(slots._arena[1], record * value)
    link.after_read(1)


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_take_at_least_their_bytes_over_the_speed(copies: int) -> None:
    record, slots = record_of(64 * 1024)
    link = HostLink(2e6)  # 33 ms a record
    for pause_s in (0.0, 0.1):  # time that the link lay idle earns nothing
        time.sleep(pause_s)
        assert timed(link, record, slots, copies) >= copies * record.nbytes / 2e6 * 0.999


def test_the_bytes_counted_are_those_of_the_host_record_not_of_a_wider_slot() -> None:
    record, slots = record_of(256 * 1024)
    half = record.to(torch.bfloat16)
    assert min(timed(HostLink(5e6), half, slots, 1) for _ in range(3)) < record.nbytes / 5e6 * 0.9


@pytest.mark.parametrize(("num_bytes", "copies"), [(32 * 1024, 100), (64 * 1024, 60), (512 * 1024, 20)])
def test_the_long_run_rate_is_the_emulated_speed(num_bytes: int, copies: int) -> None:
    speed = 2.5e8  # from 0.13 ms a record: a sleep of that length overshoots by half of it
    record, slots = record_of(num_bytes)
    nominal = copies * num_bytes / speed
    link = HostLink(speed)
    started = time.perf_counter()
    runs = [timed(link, record, slots, copies) for _ in range(16)]  # the fastest: other programs run too
    assert time.perf_counter() - started >= 0.999 * len(runs) * nominal
    assert min(runs) <= 1.1 * nominal


def test_without_a_speed_nothing_is_slowed_down() -> None:
    record, slots = record_of(4096)
    assert min(timed(HostLink(None), record, slots, 100) for _ in range(3)) < 0.1
