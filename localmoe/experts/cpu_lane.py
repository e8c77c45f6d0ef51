"""The CPU lane: threads that compute experts from their host records, for passes that run on the GPU or for a
caller that works along. Decides neither which experts those are (for the former the pass does, see
kernels.gpu.lanes) nor how many threads there should be.

Threads run compiled code outside Python's lock. While jobs come in quick succession they spin; in longer
pauses they nap, and after a while without a job they wait in Python until a pass is announced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.errors import HardwareError
from localmoe.core.uncollected import uncollected
from localmoe.core.uninterrupted import Monitor
from localmoe.experts.lane_arguments import on_host, unit_computes, worker_arguments
from localmoe.experts.lane_attention import LaneAttention
from localmoe.experts.record_store import RecordStore
from localmoe.kernels.activations import Activation
from localmoe.kernels.cpu import control, worker
from localmoe.kernels.mailbox import BEGIN, END, EXPERT, NOBODY, SHARE, Mailbox, MailboxLayout

SPIN_S = 0.0004  # longer than what lies between two jobs, of which attention takes a GPU most
PARK_S = 1.0  # longer than drafts take; waking takes Python's lock, thread by thread
_GLANCE_S, _SHORT_S = 5e-5, 0.02  # the latter to measure the clock by
_ALONE_BYTES = 512 << 10  # what one core reads before another one is awake


@dataclass(frozen=True, slots=True)
class LaneCounters:
    """Totals since the lane was made: jobs, bytes of weights that they read, seconds from a job's start to
    its answer; of the bytes those that were asked for before the job came, as the GPU had foretold it."""

    jobs: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    ahead_bytes: int = 0


class CpuLane:
    """Threads, their mailbox, and what they need to know of a model's experts."""

    longest_job_s = 5.0  # before it counts as lost

    def __init__(
        self, store: RecordStore, activation: Activation,
        biases: Sequence[tuple[Tensor | None, Tensor | None]], *, tokens: int, top_k: int, threads: int,
        pinned: bool, dtype: torch.dtype | None = None, caller_works: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            store: 16-bit records, or in MXFP4, NVFP4, BF12 or FP8; all layers of one hidden size.
            biases: for each layer gate_up's (E, 2I) and down's (E, H), in the order of the record.
            tokens: rows of the widest window. top_k: experts a token.
            pinned: a GPU is to reach the mailbox.
            dtype: of activations and biases, to which gate * up is rounded: the store's, or float32.
            caller_works: no job comes but from `compute`, whose caller is one of the threads.
        """
        self._dtype = dtype or store.dtype
        self._caller_works = caller_works
        hidden = store.layouts[0].hidden
        self.layout = MailboxLayout(tokens, top_k, store.num_experts, hidden, self._dtype.itemsize)
        self.mailbox = Mailbox(self.layout, self._dtype, pinned=pinned)
        self.num_threads = threads
        self._store = store
        self._biases = [[on_host(bias) for bias in pair] for pair in biases]  # kept alive
        self._control = np.zeros(control.CONTROL_WORDS, dtype=np.int64)
        self._dense = np.zeros(control.DENSE_WORDS, dtype=np.int64)
        self._attention = LaneAttention() if caller_works else None
        self._control[control.FETCHED] = NOBODY
        self._ticks_per_s = _ticks_per_second()
        # a caller that works along is promised that a token's sum does not depend on the tokens beside it
        self.has_matrix_unit = not caller_works and unit_computes(store.layouts[0].form, self._dtype)
        self._arguments = worker_arguments(
            store, activation, self._biases, self.mailbox, self._dtype, threads, self._control, self._dense,
            self._attention, matrix_unit=self.has_matrix_unit,
        )  # fmt: skip
        self._posting, self._condition = threading.Lock(), Monitor()
        self._parked, self._stopped = 0, False
        self.failure = ""  # one sentence, once a thread has failed
        self._compile()
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"cpu-lane-{i}", daemon=True)
            for i in range(threads - caller_works)
        ]
        for thread in self._threads:
            thread.start()

    def _compile(self) -> None:
        """Some seconds the first time; later it is read from numba's cache on disk."""
        self._control[control.STOP] = 1
        with uncollected():
            worker.run(0, 0, 0, *self._arguments)
        self._control[control.STOP] = 0

    def _work(self, me: int) -> None:
        spin, park = int(SPIN_S * self._ticks_per_s), int(PARK_S * self._ticks_per_s)
        try:
            while True:
                if worker.run(me, spin, park, *self._arguments) == worker.STOPPED:
                    return
                with self._condition:
                    self._parked += 1
                    while not self._control[control.HOLD] and not self._stopped:
                        self._condition.wait()
                    self._parked -= 1
        except BaseException as error:  # compiling may fail in any way; the passes go on without this lane
            self._fail(f"{type(error).__name__}: {error}", stops=self._caller_works)

    def _fail(self, reason: str, *, stops: bool) -> None:
        """stops: somebody would wait for what a thread has drawn."""
        self.failure = reason
        if stops:
            self._control[control.STOP] = 1
        self._abandon()

    def brought_since(self, job: int) -> bool:
        """Whether records of later jobs had to be brought into RAM."""
        return int(self._control[control.ABSENT]) > job

    def hold(self) -> None:
        """Jobs may come any moment now: threads look out for them until `rest`."""
        with self._condition:
            self._control[control.HOLD] = 1
            if self._parked:
                self._condition.notify_all()

    def wake(self, seconds: float) -> None:
        """After `hold`, wait until all threads look out, or so long. Each needs Python's lock for that, which
        a caller that launches many kernels would give away seldom."""
        end = time.perf_counter() + seconds
        while self._parked and time.perf_counter() < end:
            time.sleep(_GLANCE_S)

    def use_matrix_unit(self, wanted: bool) -> None:
        """Whether jobs posted from here on may use it, where there is one. It is faster for experts of some
        tokens, sums in another order, and has the whole processor's clock go slower."""
        self._control[control.MAY_USE_UNIT] = wanted and self.has_matrix_unit

    def rest(self) -> None:
        """No job comes until `hold`; threads look out for a little longer, as there may be more soon."""
        self._control[control.HOLD] = 0

    @property
    def healthy(self) -> bool:
        """Whether every job will be answered."""
        return not self.failure and not self._stopped and all(thread.is_alive() for thread in self._threads)

    def counters(self) -> LaneCounters:
        """Totals."""
        places = [control.JOBS, control.BUSY_TICKS, control.DONE_BYTES, control.AHEAD_BYTES]
        jobs, busy, num_bytes, ahead_bytes = self._control[places].tolist()
        return LaneCounters(jobs, num_bytes, busy / self._ticks_per_s, ahead_bytes)

    # -- jobs of the host itself

    def compute(self, layer: int, x: Tensor, experts: Sequence[tuple[int, Sequence[int], int]]) -> Tensor:
        """A job posted by the host, while no pass runs: (expert, its pairs, inner columns) each.

        Args:
            x: (T, H) in the lane's dtype.

        Returns:
            float32 (T * K, H), by pair; other rows are whatever they were.

        Raises:
            HardwareError: nobody answers, or it was closed meanwhile.
        """
        box = self.mailbox
        with self._posting:
            box.x[: len(x)] = _words(x).view(box.x.dtype)
            begin = 0
            for i, (expert, pairs, share) in enumerate(experts):
                end = begin + len(pairs)
                box.pairs[begin:end] = pairs
                for field, number in ((EXPERT, expert), (BEGIN, begin), (END, end), (SHARE, share)):
                    box.entries[field, i] = number
                begin = end
            box.head[:] = layer, len(experts), len(x)
            self._post(len(experts) * self._store.layouts[layer].num_bytes(self._store.dtype))
            return torch.from_numpy(box.out[: len(x) * self.layout.top_k].copy())

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: int | None = None) -> Tensor:
        """x W^T + b by the same threads, of weights that lie as they are: exact products, float32 sums.

        Args:
            x: float32 (T, K). weight: (N, K) in the store's dtype or float32, its rows side by side. bias:
                float32 (N,).

        Returns:
            float32 (T, N), or as many rows as are asked for, of zeros from T on; a row's bits do not depend
            on the other rows.

        Raises:
            HardwareError: as `compute`.
        """
        wide = weight.dtype == torch.float32
        assert x.dtype == torch.float32 and weight.is_contiguous()
        assert wide or weight.dtype == self._store.dtype, "the code is that of one kind of words"
        x = x.contiguous()
        tokens, (height, width) = x.shape[0], weight.shape
        out = torch.empty(tokens if rows is None else rows, height, dtype=torch.float32)
        if out.shape[0] > tokens:
            out[tokens:] = 0
        bias_at = 0 if bias is None else bias.data_ptr()
        blocks, most = -(-height // control.DENSE_BLOCK), self.layout.tokens
        with self._posting:
            for first in range(0, tokens, most):
                x_at, out_at = (t.data_ptr() + 4 * first * t.shape[1] for t in (x, out))
                self._dense[:] = weight.data_ptr(), bias_at, x_at, out_at, height, width, wide
                self.mailbox.head[:] = control.DENSE, blocks, min(most, tokens - first)
                self._post(weight.nbytes)
        return out

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As kernels.attention.blocked_attention, in float32, by the same threads, where the caller is one.

        Raises:
            HardwareError: as `compute`.
        """
        assert self._attention is not None, "its code is compiled where the caller works along"

        def post(blocks: int, tokens: int, num_bytes: int) -> None:
            self.mailbox.head[:] = control.ATTEND, blocks, tokens
            self._post(num_bytes)

        with self._posting:
            return self._attention.run(post, query, keys, values, mask, scale, softcap, sinks)

    def _post(self, num_bytes: int) -> None:
        """Have the job in the mailbox done, which reads so much."""
        box = self.mailbox
        job = max(int(box.posted[0]), int(box.answered[0])) + 1
        if self._caller_works and num_bytes < _ALONE_BYTES:
            return self._work_along(job)
        self.hold()
        try:
            box.posted[0] = job
            if self._caller_works:
                self._work_along(job)
            else:
                self._wait_for(job)
        except KeyboardInterrupt:  # it may have come before this caller worked
            if self._caller_works:
                self._work_along(job)  # nobody may be at its memory once that goes, or is the next one's
            raise
        finally:
            self.rest()

    def _work_along(self, job: int) -> None:
        if worker.run(self.num_threads - 1, job, -1, *self._arguments) == worker.STOPPED:
            self.close()  # before the job's memory goes, no other thread may be at it
            raise HardwareError(f"The CPU lane has ended ({self.failure or 'it was closed'}).")

    def _wait_for(self, job: int) -> None:
        deadline = time.perf_counter() + self.longest_job_s
        while int(self.mailbox.answered[0]) != job:
            if time.perf_counter() > deadline or not self.healthy:
                raise HardwareError(f"The CPU lane does not answer ({self.failure or 'it is too slow'}).")
            time.sleep(0)

    def close(self) -> None:
        """End the threads, in the middle of a job if need be. A second call does nothing."""
        self._stopped = True
        self._control[control.STOP] = 1
        with self._condition:
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
        self._abandon()

    def _abandon(self) -> None:
        self.mailbox.answered[0] = -1  # whoever waits sees that nobody is there


def _words(x: Tensor) -> NDArray[Any]:
    x = x.contiguous()
    return (x if x.dtype == torch.float32 else x.view(torch.int16)).numpy()


def _ticks_per_second() -> float:
    worker.now()  # compiled
    started, before = time.perf_counter(), worker.now()
    time.sleep(_SHORT_S)
    return float(worker.now() - before) / (time.perf_counter() - started)
