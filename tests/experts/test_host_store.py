"""Host records: page-aligned, apart from each other, and what their views say; pinning all or nothing."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.errors import BudgetError, HardwareError
from localmoe.core.types import ExpertKey
from localmoe.experts import host_memory
from localmoe.experts.host_store import HostStore
from localmoe.experts.records import PAGE_BYTES, RecordLayout
from localmoe.experts.slots import DeviceSlots
from localmoe.kernels.cuda_driver import DriverCallError, device_address

layouts = st.builds(
    lambda h, i, transposed: RecordLayout(
        (h, 2 * i) if transposed else (2 * i, h), (i, h) if transposed else (h, i), transposed
    ),
    st.integers(1, 40), st.integers(1, 40), st.booleans(),
)  # fmt: skip
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def keys(store: HostStore) -> list[ExpertKey]:
    return [ExpertKey(i, j) for i in range(store.num_layers) for j in range(store.num_experts)]


@given(st.lists(layouts, min_size=1, max_size=3), st.integers(1, 4), DTYPES)
@settings(max_examples=40)
def test_records_are_page_aligned_apart_and_exactly_gate_up_then_down(
    shapes: list[RecordLayout], experts: int, dtype: torch.dtype
) -> None:
    store = HostStore(shapes, experts, dtype)
    ends: list[tuple[int, int]] = []
    for i, key in enumerate(keys(store)):
        layout = shapes[key.layer]
        record, (gate_up, down) = store.record(key), store.views(key)
        assert record.data_ptr() % PAGE_BYTES == 0
        assert record.dtype == gate_up.dtype == down.dtype == dtype
        assert (record.numel(), record.nbytes) == (layout.elements, layout.num_bytes(dtype))
        assert tuple(gate_up.shape) == layout.gate_up_shape
        assert tuple(down.shape) == layout.down_shape
        gate_up.fill_(i + 1)
        down.fill_(-i - 1)
        ends.append((record.data_ptr(), record.data_ptr() + record.nbytes))
    for (_, end), (start, _) in zip(sorted(ends), sorted(ends)[1:], strict=False):
        assert end <= start
    for i, key in enumerate(keys(store)):  # nobody wrote into anybody else
        split = shapes[key.layer].gate_up_elements
        assert (store.record(key)[:split] == i + 1).all()
        assert (store.record(key)[split:] == -i - 1).all()
    pages = sum(-(-layout.num_bytes(dtype) // PAGE_BYTES) for layout in shapes) * experts
    assert store.num_bytes == pages * PAGE_BYTES


def test_a_record_outlives_its_store() -> None:
    store = HostStore([RecordLayout((4, 2), (2, 2), False)], 2, torch.float32)
    record = store.record(ExpertKey(0, 1))
    record.fill_(7)
    store.close()
    del store
    assert (record == 7).all()


@given(layouts, st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 99))
@settings(max_examples=30)
def test_a_slot_shows_a_record_exactly_also_in_a_wider_type(
    layout: RecordLayout, dtype: torch.dtype, seed: int
) -> None:
    store = HostStore([layout], 1, dtype)
    key = ExpertKey(0, 0)
    store.record(key).copy_(torch.randn(layout.elements, generator=torch.Generator().manual_seed(seed)))
    slots = DeviceSlots(3, layout.elements + 5, torch.float32, torch.device("cpu"))
    for slot in (0, 2):
        slots.write(slot, torch.full((layout.elements + 5,), 9.0))
    slots.write(1, store.record(key))
    for got, host in zip(slots.views(1, layout), store.views(key), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, host.float())
        assert torch.equal(got.to(dtype), host)
    for slot in (0, 2):  # the neighbours are untouched
        assert (torch.cat([view.flatten() for view in slots.views(slot, layout)]) == 9).all()
    assert slots.num_bytes == 3 * (layout.elements + 5) * 4
    slots.release()
    assert slots.num_bytes == 0


class Driver:
    """Stands in for the CUDA driver, on a system where the device has addresses of its own; refuses the n-th
    registration."""

    def __init__(self, refuse: int | None) -> None:
        self.refuse = refuse
        self.elsewhere = 0  # from host addresses to the device's, other ones for each layer
        self.knows_addresses = True
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.refuse:
            return 304
        self.registered[pointer] = size
        return 0

    def device_address(self, pointer: int) -> int:
        if not self.knows_addresses or pointer not in self.registered:
            raise DriverCallError("cuMemHostGetDevicePointer", 1)
        self.elsewhere += 1 << 40
        return pointer + self.elsewhere

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


def with_driver(monkeypatch: pytest.MonkeyPatch, refuse: int | None) -> tuple[Driver, HostStore]:
    driver = Driver(refuse)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: driver))
    monkeypatch.setattr(host_memory, "device_address", driver.device_address)
    return driver, HostStore([RecordLayout((4, 2), (2, 2), False)] * 3, 2, torch.float32)


def test_pinning_registers_every_layer_and_closing_unregisters_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, store = with_driver(monkeypatch, None)
    with store:
        store.pin()
        assert sum(driver.registered.values()) == store.num_bytes
    assert driver.registered == {}
    store.close()


def test_kernels_get_the_devices_addresses_and_the_host_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = with_driver(monkeypatch, None)[1]
    own = {key: store.record(key).data_ptr() for key in keys(store)}
    assert {key: store.device_address(key) for key in own} == own, "nothing is registered"
    store.pin()
    wanted = {key: address + ((key.layer + 1) << 40) for key, address in own.items()}
    assert {key: int(store.device_addresses()[key]) for key in own} == wanted
    assert {key: store.device_address(key) for key in own} == wanted
    assert {key: store.record(key).data_ptr() for key in own} == own
    store.close()


def test_where_the_driver_does_not_say_the_hosts_address_is_taken_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, store = with_driver(monkeypatch, None)
    driver.knows_addresses = False
    store.pin()
    assert all(store.device_address(key) == store.record(key).data_ptr() for key in keys(store))
    assert len(driver.registered) == len(caplog.records) == 3
    assert "where the host does: cuMemHostGetDevicePointer failed with error 1" in caplog.text
    store.close()


def test_the_embedding_is_pinned_and_found_like_records_and_goes_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, without = with_driver(monkeypatch, None)
    store = HostStore(without.layouts, 2, torch.float32, (5, 3))
    table = store.embedding
    assert table is not None and table.shape == (5, 3) and table.dtype == torch.float32
    assert table.data_ptr() % PAGE_BYTES == 0 and store.num_bytes == without.num_bytes + table.nbytes
    assert store.embedding_address == table.data_ptr(), "nothing is registered"
    store.pin()
    store.pin()
    assert driver.registered[table.data_ptr()] == table.nbytes and driver.calls == 4
    assert store.embedding_address - table.data_ptr() == driver.elsewhere, "the last one that was asked for"
    store.close()
    assert driver.registered == {} and store.embedding is None
    table.fill_(1.0)  # memory in use elsewhere goes with its last view


@pytest.mark.gpu
def test_the_driver_knows_where_the_device_finds_pinned_records() -> None:
    with HostStore([RecordLayout((4, 2), (2, 2), False)] * 2, 3, torch.float32) as store:
        with pytest.raises(DriverCallError):
            device_address(store.record(ExpertKey(0, 0)).data_ptr())
        store.pin()
        assert device_address(store.record(ExpertKey(1, 2)).data_ptr()) == store.device_address(
            ExpertKey(1, 2)
        )


def test_a_layer_is_registered_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, store = with_driver(monkeypatch, None)
    store.pin_layer(1)
    assert list(driver.registered) == [store.record(ExpertKey(1, 0)).data_ptr()]
    store.pin()
    store.pin_layer(2)
    assert driver.calls == len(driver.registered) == 3
    store.close()
    assert driver.registered == {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux knows of a mapping")
def test_records_ask_for_huge_pages_and_are_not_copied_into_forked_children() -> None:
    store = HostStore([RecordLayout((1024, 512), (512, 512), False)], 8, torch.bfloat16)  # 12 MiB
    address = store.record(ExpertKey(0, 0)).data_ptr()
    permissions, flags = mapping_at(address)
    assert permissions == "rw-p"
    assert "dc" in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def mapping_at(address: int) -> tuple[str, list[str]]:
    """(permissions, flags) of the mapping that holds an address."""
    permissions, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span, *rest = line.split()
        if "-" in span and not span.endswith(":"):
            start, end = (int(part, 16) for part in span.split("-"))
            permissions, inside = rest[0], start <= address < end
        elif inside and span == "VmFlags:":
            return permissions, rest
    raise AssertionError("no such mapping")


def test_a_refused_pin_is_one_sentence_and_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, store = with_driver(monkeypatch, 3)
    with pytest.raises(HardwareError, match=r"refused to pin 24\.0 KiB of host memory \(error 304\): close"):
        store.pin()
    assert driver.registered == {}


def test_memory_that_the_system_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `ulimit -v`, or where no more is promised than there is."""

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(host_memory.mmap, "mmap", refuse)
    layouts = [RecordLayout((64, 32), (32, 32), transposed=False)]
    with pytest.raises(BudgetError, match=r"refuses 32.0 KiB of RAM .*allocate memory.*ulimit -v"):
        HostStore(layouts, 4, torch.bfloat16)
