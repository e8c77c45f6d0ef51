"""The CPU lane over experts on the disk: the bits of one over RAM, whatever gives way meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from disk_rig import HIDDEN, INNER, stores

from localmoe.core.errors import HardwareError
from localmoe.core.types import ExpertKey
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.disk_lane import DiskLane
from localmoe.experts.disk_store import DiskStore
from localmoe.kernels.activations import Activation
from localmoe.kernels.mailbox import NOBODY
from localmoe.kernels.weight_forms import WeightForm

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 12, 3, 8
Entries = list[tuple[int, list[int], int]]


@contextmanager
def lanes(
    folder: Path, places: int, form: WeightForm = WeightForm.BF12
) -> Iterator[tuple[DiskLane, CpuLane]]:
    disk, whole = stores(folder, places, layers=LAYERS, experts=EXPERTS, form=form)
    made = [
        lane(
            store, Activation("silu"), [(None, None)] * LAYERS, tokens=TOKENS, top_k=TOP_K, threads=2,
            pinned=False,
        )
        for lane, store in ((DiskLane, disk), (CpuLane, whole))
    ]  # fmt: skip
    try:
        yield made[0], made[1]  # type: ignore[misc]
    finally:
        for lane, store in zip(made, (disk, whole), strict=True):
            lane.close()
            store.close()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith(("cpu-lane", "localmoe-disk"))]


def job(chance: random.Random) -> tuple[int, torch.Tensor, Entries]:
    """A layer, rows, and who computes which."""
    tokens = chance.randrange(1, TOKENS + 1)
    rows: dict[int, list[int]] = {}
    for token in range(tokens):
        for k, expert in enumerate(chance.sample(range(EXPERTS), TOP_K)):
            rows.setdefault(expert, []).append(TOP_K * token + k)
    x = torch.randn(
        tokens, HIDDEN, generator=torch.Generator().manual_seed(chance.randrange(1000))
    ).bfloat16()
    return chance.randrange(LAYERS), x, [(expert, pairs, INNER) for expert, pairs in sorted(rows.items())]


def store_of(lane: CpuLane) -> DiskStore:
    assert isinstance(lane._store, DiskStore)
    return lane._store


@pytest.mark.parametrize("form", [WeightForm.BF12, WeightForm.PLAIN])
def test_every_job_equals_that_of_a_lane_over_ram(tmp_path: Path, form: WeightForm) -> None:
    chance = random.Random(0)
    with lanes(tmp_path, EXPERTS, form) as (disk, ram):
        for _ in range(60):
            wanted = job(chance)
            assert torch.equal(disk.compute(*wanted), ram.compute(*wanted))
        assert store_of(disk).counters().disk_bytes > 0


def test_experts_of_a_job_do_not_give_way_while_others_are_read(tmp_path: Path) -> None:
    chance, ended = random.Random(1), threading.Event()
    with lanes(tmp_path, EXPERTS) as (disk, ram):
        store = store_of(disk)

        def crowd() -> None:
            others = random.Random(2)
            while not ended.is_set():
                key = ExpertKey(others.randrange(LAYERS), others.randrange(EXPERTS))
                store.prefetch(key)
                if others.random() < 0.2:
                    store.record(key)
                time.sleep(2e-4)

        thread = threading.Thread(target=crowd)
        thread.start()
        try:
            for _ in range(75):
                wanted = job(chance)
                assert torch.equal(disk.compute(*wanted), ram.compute(*wanted))
        finally:
            ended.set()
            thread.join()
        assert store.counters().wasted > 0  # it was crowded


def test_what_cannot_be_read_ends_the_lane_with_the_reason(tmp_path: Path) -> None:
    chance = random.Random(3)
    with lanes(tmp_path, EXPERTS) as (disk, _):
        store = store_of(disk)
        store.file.path.write_bytes(b"")
        with pytest.raises(HardwareError, match="shorter than it was"):
            for _ in range(20):
                disk.compute(*job(chance))
        assert not disk.healthy and int(disk.mailbox.answered[0]) == -1
        assert int(disk.mailbox.foretold[0]) == NOBODY


def test_closing_ends_a_job_that_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lanes(tmp_path, EXPERTS) as (disk, _):
        store, reading = store_of(disk), threading.Event()
        goes_on = threading.Event()
        read = store._reader._read

        def slow(offset: int, memory: torch.Tensor) -> None:
            reading.set()
            goes_on.wait(20)
            read(offset, memory)

        monkeypatch.setattr(store._reader, "_read", slow)
        failed: list[Exception] = []

        def ask() -> None:
            try:
                disk.compute(*job(random.Random(4)))
            except HardwareError as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert reading.wait(10)
        threading.Timer(0.3, goes_on.set).start()
        disk.close()
        thread.join(10)
        assert failed and not thread.is_alive()


def test_a_record_is_had_once_the_job_that_uses_all_places_is_over(tmp_path: Path) -> None:
    everybody = [(expert, [expert % TOP_K], INNER) for expert in range(EXPERTS)]
    with lanes(tmp_path, EXPERTS) as (disk, ram):
        store, x = store_of(disk), torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        disk.compute(0, x, everybody)
        box, held = disk.mailbox, threading.Event()
        answered, box.answered[0] = int(box.answered[0]), -2  # as if it went on
        found: list[torch.Tensor] = []

        def ask() -> None:
            held.set()
            found.append(store.record(ExpertKey(1, 3)))

        thread = threading.Thread(target=ask)
        thread.start()
        assert held.wait(5)
        time.sleep(0.1)
        assert not found
        box.answered[0] = answered
        thread.join(5)
        assert torch.equal(found[0], ram._store.record(ExpertKey(1, 3)))
