"""Copies on a GPU: what arrives, in which order, whoever asks for it."""

from __future__ import annotations

import threading

import pytest
import torch
from experts.expert_rig import LAYOUT, make_store

from localmoe.core.errors import TransferError
from localmoe.core.types import ExpertKey
from localmoe.experts import transfers
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import CudaTransfers
from localmoe.kernels.cuda_driver import DriverCallError

pytestmark = pytest.mark.gpu


def test_records_arrive_in_their_slots_before_their_tickets_do() -> None:
    device = torch.device("cuda")
    with make_store(2, 6) as store:
        store.pin()
        slots = DeviceSlots(5, LAYOUT.elements + 8, store.dtype, device)
        slots._arena.fill_(torch.nan)
        done = torch.zeros(1, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        made = CudaTransfers(done)
        for round_ in range(3):
            keys = [ExpertKey(slot % 2, (slot + round_) % 6) for slot in range(4)]
            records = [store.record(key) for key in keys]
            tickets = [made.copy_all(records[:3], slots, (0, 1, 2)), made.copy_all(records[3:], slots, (3,))]
            assert tickets == [2 * round_ + 1, 2 * round_ + 2] and made.issued == tickets[-1]
            made.compute_waits_for_copies()
            assert int(done) == tickets[-1]
            for slot, key in enumerate(keys):
                assert torch.equal(slots._arena[slot, : LAYOUT.elements].cpu(), store.record(key))
        assert slots._arena[4].isnan().all() and slots._arena[:4, LAYOUT.elements :].isnan().all()


def test_any_thread_may_ask() -> None:
    device = torch.device("cuda")
    with make_store(1, 2) as store:
        store.pin()
        slots = DeviceSlots(1, LAYOUT.elements, store.dtype, device)
        made = CudaTransfers(torch.zeros(1, dtype=torch.int64, device=device))
        found: list[BaseException | int] = []

        def ask() -> None:
            try:
                found.append(made.copy_all([store.record(ExpertKey(0, 1))], slots, (0,)))
                made.drain()
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert found == [1]
        assert torch.equal(slots._arena[0].cpu(), store.record(ExpertKey(0, 1)))


def test_a_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise DriverCallError("cuMemcpyHtoDAsync", 700)

    monkeypatch.setattr(transfers, "copy_to_device", refuse)
    device = torch.device("cuda")
    with make_store(1, 1) as store:
        slots = DeviceSlots(1, LAYOUT.elements, store.dtype, device)
        made = CudaTransfers(torch.zeros(1, dtype=torch.int64, device=device))
        with pytest.raises(TransferError, match=r"The GPU did not take a copy of an expert: .* error 700"):
            made.copy_all([store.record(ExpertKey(0, 0))], slots, (0,))
