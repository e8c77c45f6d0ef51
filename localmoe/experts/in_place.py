"""Experts of a model that runs on the CPU, computed where their records lie: the RAM that holds them is the
memory that computes, so nothing is copied, and every expert is there, or is read from the disk first. Decides
nothing; the work is the CPU lane's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.errors import HardwareError, TransferError
from localmoe.core.timeline import Timeline
from localmoe.core.types import ExpertKey
from localmoe.core.uninterrupted import Monitor
from localmoe.experts.counters import TransferCounters
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.lane_attention import MOST_SHARING
from localmoe.experts.memory import DemandReport
from localmoe.experts.record_store import RecordStore
from localmoe.kernels.attention import blocked_attention
from localmoe.kernels.experts import combine

if TYPE_CHECKING:  # it needs numba's compiler
    from localmoe.experts.cpu_lane import CpuLane


class InPlaceSlots:
    """A slot for every expert, each of which is its host record: they take no memory of their own."""

    num_bytes = 0

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def release(self) -> None:
        """There is nothing to give back: the records are the store's."""
        self.num_slots = 0


class InPlaceMemory:
    """Stands where ExpertMemory does; a demand is a hit if the expert is in RAM. Closing it ends the lane's
    threads."""

    def __init__(self, store: RecordStore, lane: CpuLane) -> None:
        """lane: its caller works along; in the dtype that the model computes in."""
        from localmoe.kernels.cpu.row_ops import combine_rows  # its compiler has come with the lane

        self.store = store
        self._disk = store if isinstance(store, DiskStore) else None
        self.slots = InPlaceSlots(store.num_layers * store.num_experts)
        self.layer_batches = False  # no prefetch, no batch of them
        self.timeline: Timeline | None = None
        self.lane = lane
        self.lock = Monitor()
        self._here = np.ones((store.num_layers, store.num_experts), np.bool_)
        self.closed = False
        self._pytorch_threads = torch.get_num_threads()
        self._combine_rows = combine_rows

    def compute(
        self, layer: int, x: Tensor, rows: Mapping[int, Sequence[int]], top_k: int
    ) -> tuple[DemandReport, Tensor]:
        """Every expert's output for the tokens that chose it.

        Args:
            x: (T, H). rows: expert -> flat (token, k) positions.

        Returns:
            How the experts were found, and (T, K, H) in x.dtype; zeros where nobody was chosen.

        Raises:
            TransferError: the engine was closed. HardwareError: a thread has failed. DiskError:
                one cannot be read.
        """
        report = DemandReport(frozenset(rows), frozenset(), frozenset())
        with self._until_closed():
            if self._disk is None:
                out = self._compute(layer, x, rows, sorted(rows))
            else:
                report, out = self._as_they_arrive(self._disk, layer, x, rows, top_k)
        out = out.view(len(x), top_k, -1).to(x.dtype)
        if sum(map(len, rows.values())) < len(x) * top_k:
            out = _without_others(out, rows)
        return report, out

    def _compute(
        self, layer: int, x: Tensor, rows: Mapping[int, Sequence[int]], experts: Sequence[int]
    ) -> Tensor:
        inner = self.store.layouts[layer].inner
        return self.lane.compute(layer, x, [(expert, rows[expert], inner) for expert in experts])

    def _as_they_arrive(
        self, disk: DiskStore, layer: int, x: Tensor, rows: Mapping[int, Sequence[int]], top_k: int
    ) -> tuple[DemandReport, Tensor]:
        """Those in RAM first; what is read meanwhile comes in as many jobs as it arrives in."""
        out: Tensor | None = None
        with disk.held(layer, sorted(rows)) as (report, groups):
            if len(x) > 1:
                chosen = np.full(len(x) * top_k, disk.num_experts, dtype=np.int32)  # by nobody
                for expert, pairs in rows.items():
                    chosen[pairs] = expert
                disk.note_tokens(layer, chosen.reshape(-1, top_k))
            for experts in groups:
                computed = self._compute(layer, x, rows, experts)
                if out is None:
                    out = computed
                else:
                    arrived = [pair for expert in experts for pair in rows[expert]]
                    out[arrived] = computed[arrived]
        assert out is not None, "somebody was chosen"
        return report, out

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: int | None = None) -> Tensor:
        """As CpuLane.dense, for the model's linear layers.

        Raises:
            TransferError, HardwareError: as `compute`.
        """
        with self._until_closed():
            return self.lane.dense(x, weight, bias, rows=rows)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, *,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As kernels.attention.blocked_attention, by the lane where it can: in float32, over a cache's own
        memory, of not too many heads a KV head.

        Raises:
            TransferError, HardwareError: as `compute`.
        """
        alike = query.dtype == key.dtype == value.dtype == torch.float32
        packed = all(t.stride()[1:] == (t.shape[2], 1) for t in (key, value))
        if not alike or not packed or len(query) > MOST_SHARING * len(key):
            return blocked_attention(query, key, value, mask, scale, softcap=softcap, sinks=sinks)
        with self._until_closed():
            return self.lane.attend(query, key, value, mask, scale, softcap, sinks)

    def combine(self, expert_out: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The same bits as kernels.experts.combine."""
        if expert_out.dtype == top_k_weights.dtype == torch.float32:
            return self._combine_rows(expert_out, top_k_index, top_k_weights)
        return combine(expert_out, top_k_index, top_k_weights, expert_out.dtype)

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        except HardwareError as error:
            if self.closed:
                raise TransferError("The engine was closed while an answer was being written.") from error
            raise

    @contextmanager
    def one_pytorch_thread(self) -> Iterator[None]:
        """Around a pass: PyTorch's other threads would only take the cores of the lane's, which do what takes
        long, and be waited for. What is set counts for the thread that calls, and for those that begin."""
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._pytorch_threads)

    def counters(self) -> TransferCounters:
        """Nothing is copied, but some may be read."""
        return TransferCounters(stall_s=0.0) if self._disk is None else self._disk.counters()

    def copy_s(self) -> float | None:
        """None: no copy is ever made."""
        return None

    def resident_keys(self) -> list[ExpertKey]:
        """All that are in RAM."""
        return [ExpertKey(int(layer), int(expert)) for layer, expert in np.argwhere(self.residency())]

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in RAM, or on its way there."""
        return self._here if self._disk is None else self._disk.residency()

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Nothing happens where it is here already."""
        if self._disk is not None:
            self._disk.prefetch(key)

    def begin_answer(self) -> None:
        """What was read ahead for the one before is its own."""
        if self._disk is not None:
            self._disk.begin_answer()

    def drop_prefetches(self, layer: int | None = None) -> None:
        """There are none."""

    def settle(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """End the threads, in the middle of a job if need be."""
        self.closed = True
        self.lane.close()


def _without_others(out: Tensor, rows: Mapping[int, Sequence[int]]) -> Tensor:
    """Zeros in the rows of nobody, which hold whatever they held before."""
    flat = out.view(-1, out.shape[-1])
    chosen = torch.zeros(len(flat), 1, dtype=torch.bool)
    for positions in rows.values():
        chosen[list(positions)] = True
    return torch.where(chosen, flat, 0).view_as(out)
