"""The CPU lane of a model whose experts lie on the disk: jobs name experts that are not in RAM, and one
thread more has them read, which the lane's own threads wait for. What RAM holds is the store's business.

An expert of the job at hand never gives way: the store asks before it lets one go. It has taken that one's
address back by then, so that a job which is posted later finds it absent.
"""

from __future__ import annotations

import threading
from typing import Any

from localmoe.core.errors import LocalMoeError
from localmoe.core.types import ExpertKey
from localmoe.experts.cpu_lane import PARK_S, CpuLane
from localmoe.experts.disk_store import DiskStore
from localmoe.kernels.cpu import control
from localmoe.kernels.cpu.absent import PARKED, STOPPED, wait_for_absent
from localmoe.kernels.mailbox import EXPERT, HEAD_ENTRIES, HEAD_LAYER, HEAD_TOKENS


class DiskLane(CpuLane):
    """As CpuLane, with a thread that has absent experts read."""

    longest_job_s = 120.0  # a slow disk's

    def __init__(self, store: DiskStore, *arguments: Any, **options: Any) -> None:
        """As CpuLane's; nobody else posts jobs for this store."""
        self._disk = store
        super().__init__(store, *arguments, **options)
        store.in_use = self._is_of_the_job
        self._reads = threading.Thread(target=self._have_read, name="cpu-lane-reads", daemon=True)
        self._reads.start()

    def _compile(self) -> None:
        super()._compile()
        self._control[control.STOP] = 1
        wait_for_absent(self._control, 0, 0)
        self._control[control.STOP] = 0

    @property
    def healthy(self) -> bool:
        """Whether every job will be answered."""
        return super().healthy and self._reads.is_alive()

    def _have_read(self) -> None:
        park, seen = int(PARK_S * self._ticks_per_s), 0
        try:
            while True:
                job = wait_for_absent(self._control, seen, park)
                if job == STOPPED:
                    return
                if job == PARKED:
                    with self._condition:
                        self._parked += 1
                        while not self._control[control.HOLD] and not self._stopped:
                            self._condition.wait()
                        self._parked -= 1
                    continue
                seen = job
                layer, count = int(self.mailbox.head[HEAD_LAYER]), int(self.mailbox.head[HEAD_ENTRIES])
                experts = self.mailbox.entries[EXPERT, :count].tolist()
                choices = int(self.mailbox.head[HEAD_TOKENS]) * self.layout.top_k
                with self._disk.held(layer, experts, counts=False, choices=choices) as (_, groups):
                    for _ in groups:
                        pass
        except BaseException as error:  # whatever it was, who waits for the answer has to know
            known = isinstance(error, LocalMoeError)
            self._fail(str(error) if known else f"{type(error).__name__}: {error}", stops=True)

    def _is_of_the_job(self, key: ExpertKey) -> bool:
        box = self.mailbox
        if int(box.posted[0]) == int(box.answered[0]) or int(box.head[HEAD_LAYER]) != key.layer:
            return False
        return key.expert in box.entries[EXPERT, : int(box.head[HEAD_ENTRIES])].tolist()

    def close(self) -> None:
        """As CpuLane's."""
        super().close()
        if self._reads is not threading.current_thread():
            self._reads.join()
