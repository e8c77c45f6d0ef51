"""The CPU lane as passes use it: whether the next pass takes it, by which rates it divides work, and what the
last one showed. Computes nothing itself (experts.cpu_lane) and divides nothing (kernels.gpu.grouping does).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from localmoe.core.errors import HardwareError
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.disk_memory import DiskExpertMemory
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.lane_balance import LaneBalance, LanePass
from localmoe.experts.lane_block import LaneBlock, LaneRates, LaneReport
from localmoe.experts.lane_trial import LaneTrial
from localmoe.experts.late_answers import why_late
from localmoe.experts.slot_worth import SlotWorth

if TYPE_CHECKING:  # it needs numba's compiler
    from localmoe.experts.cpu_lane import CpuLane, LaneCounters

_LOG = logging.getLogger(__name__)
_WAKING_S = 0.005  # at most, before a prompt's pass
_GLANCE_S = 1e-4  # between two looks for an answer
_MOST_AGAIN = 3  # times that a pass is run again
_SMOOTHING = 0.05  # weight of one pass's idle time in the mean


class DeviceLane:
    """One model's CPU lane beside its passes on the GPU.

    Attributes:
        measured: rates of windows.
        prompt_kinds: of passes of prompts that can take it.
        rows: of the longest pass that may take it.
        on: whether the pass at hand takes it.
        allowed: whether the answer at hand may.
        failure: one sentence, once it is given up.
        waited: jobs that the GPU waited for since the lane was made.
        open_passes: issued with the lane, and not closed.
    """

    def __init__(
        self,
        lane: CpuLane,
        block: LaneBlock,
        rates: LaneRates,
        *,
        link: bool,
        of_prompts: Mapping[LanePass, LaneRates] | None = None,
        needed: bool = False,
        brief: bool = False,
        trial: LaneTrial | None = None,
    ) -> None:
        """rates: as measured. link: whether missing experts may come over the link too. of_prompts: rates for
        as many tokens as ask for an expert in a prompt's pass, of each kind that can be; None: of one, the
        same as windows'. needed: experts come no other way. brief: no kernel is to wait for a disk for
        seconds. trial: by which passes of one token may do without it; None: they do not."""
        self.lane = lane
        self.rows = lane.mailbox.layout.tokens
        self.block = block
        self.link = link
        self.needed = needed
        self.brief = brief
        self.measured = rates
        self.trial = trial
        self.on = False
        self.allowed = True
        self.failure = ""
        self.waited = 0
        self.open_passes = 0
        self._posted = 0
        self._again = 0  # passes that failed, one after the other,
        self._behind = 0  # and those that run behind the last of them
        self._prepared: int | None = None  # last copy issued before `prepare_pass`; None: nothing is prepared
        of_prompts = of_prompts or {LanePass.PROMPT: rates}
        self.prompt_kinds = tuple(of_prompts)
        kinds = {LanePass.WINDOW: rates, **of_prompts}
        self._balances = {kind: LaneBalance(found) for kind, found in kinds.items()}
        self._at_hand = self._balances[LanePass.WINDOW]  # of the pass that was opened last
        self._disk: DiskStore | None = None  # where experts are that are not in RAM
        self._idle_us: float | None = None  # of the link, between two layers' experts; None: not known yet
        block.restart(int(lane.mailbox.posted[0]))
        self._posted = int(lane.mailbox.posted[0])

    @property
    def rates(self) -> LaneRates:
        """Of the pass at hand, as passes like it showed them since."""
        if not self.link:
            return LaneRates(0.0, 0.0, 0.0, 1.0)  # nothing is worth waiting for the link
        return self._at_hand.rates

    @property
    def may_be_on(self) -> bool:
        """Whether passes take it that miss an expert."""
        return self.allowed and not self.failure

    def begin_answer(self, *, allowed: bool) -> None:
        """An answer's passes may take it, or not."""
        self.allowed = allowed
        if self.trial is not None:
            self.trial.begin_text()

    def takes(self, memory: DeviceExpertMemory) -> None:
        """Passes go by these slots from here on: say what the link may bring there, and to kernels."""
        memory.may_prefetch = self.link or self.needed
        if isinstance(memory, DiskExpertMemory):
            memory.reads_ram = self.link
        self._disk = memory.store if isinstance(memory.store, DiskStore) else None

    def settle(self, memory: DeviceExpertMemory, *, single: bool = False) -> None:
        """Take the lane where an expert may be missing and all is well, in a pass of a `single` token if that
        is not slower."""
        out = single and self.trial is not None and self.trial.out
        self.on = self.may_be_on and memory.may_copy and not out

    def prepare_pass(self, memory: DeviceExpertMemory) -> None:
        """For a window's pass that comes next, if one comes; of how many tokens is not known."""
        self.settle(memory, single=True)
        self._at_hand = self._balances[LanePass.WINDOW]
        if self.on and self.lane.healthy:
            self._upload(memory)
            self._prepared = memory.transfers.issued

    def open_pass(
        self, memory: DeviceExpertMemory, kind: LanePass = LanePass.WINDOW, *, single: bool = False
    ) -> None:
        """Before a window's pass, perhaps of a `single` token, or a prompt's that asks for its experts."""
        prepared, self._prepared = self._prepared, None
        self.settle(memory, single=single)
        self._at_hand, prompt = self._balances[kind], kind is not LanePass.WINDOW
        if self.needed and memory.may_copy and not self.on:
            raise _lost(self.failure or "an answer was to do without it")
        if not self.on:
            return
        if not self.lane.healthy:
            self._give_up(self.lane.failure or "its threads have ended")
            if self.needed:
                raise _lost(self.failure)
            return
        self.lane.use_matrix_unit(kind is LanePass.UNIT)
        self.lane.hold()
        if prompt:
            self.lane.wake(_WAKING_S)
        self.open_passes += 1
        if prompt or prepared != memory.transfers.issued:
            self._upload(memory)

    def _upload(self, memory: DeviceExpertMemory) -> None:
        rest_us = self.rest_us(memory.worth) if memory.copies_beside else 0.0
        self.block.upload(memory.transfers.issued, replace(self.rates, rest_us=rest_us))

    def rest_us(self, worth: SlotWorth) -> float:
        """Of the link, that completing an expert may take which the CPU computed a part of. Where all lie on
        the disk none lands in a slot within a pass."""
        completes = self.link and not self.needed
        return worth.link_time(self._idle_us or 0.0, self.measured.link_us) if completes else 0.0

    def note_pass(self, seconds: float, waited_s: float, layers: int) -> None:
        """A pass of one token, right behind another one, took so long, and of that waited for experts."""
        if self.trial is not None and self.may_be_on:
            self.trial.note(seconds)
        idle_us = max(seconds - waited_s, 0.0) * 1e6 / layers
        if self._idle_us is not None:
            idle_us = self._idle_us + _SMOOTHING * (idle_us - self._idle_us)
        self._idle_us = idle_us

    def close_pass(self, report: LaneReport) -> bool:
        """After the first open pass that took the lane: learn from it. False: a job was not answered, or not
        in time, so what the pass computed is worth nothing.

        Raises:
            HardwareError: it will not be answered, and experts come no other way.
        """
        self.open_passes -= 1
        if not self.open_passes:
            self.lane.rest()
        if report.failed:
            if self._answers_late(report):
                return False
            self._give_up(self.lane.failure or self._why_late(report))
            if self.needed:
                raise _lost(self.failure)
            return False
        self._again = self._behind = 0
        jobs, waited = report.posted - self._posted, report.waited - self.waited
        if not self.lane.brought_since(self._posted):  # a disk that was waited for says nothing of both
            self._at_hand.learn(jobs, waited)
        self._posted, self.waited = report.posted, report.waited
        return True

    def abandon_pass(self) -> None:
        """After passes that were interrupted, and have ended: go on with the next job, unprepared."""
        self._prepared = None
        if not self.open_passes:
            return
        self.open_passes = 0
        self.lane.rest()
        self._behind = 0
        report = self.block.read(self.block.numbers().cpu().numpy())
        if report.failed and self._answers_late(report):
            return
        self._posted, self.waited = report.posted, report.waited
        if report.failed:
            self._give_up(self.lane.failure or self._why_late(report))

    def _answers_late(self, report: LaneReport) -> bool:
        """After a pass that failed, of experts that come no other way: whether the CPU has answered since, or
        does so now. Then passes that come next go on behind that job."""
        if self._behind:  # what it found failed is mended
            self._behind -= 1
            return True
        if not self.needed or self._again == _MOST_AGAIN:
            return False
        box, why = self.lane.mailbox, self._why_late(report)
        self.lane.hold()
        answered = self._wait()
        if not self.open_passes:
            self.lane.rest()
        if not answered:
            return False
        self._again, self._behind = self._again + 1, self.open_passes
        _LOG.warning("a pass is run again: %s", why)
        self._posted, self.waited = int(box.posted[0]), report.waited
        self.block.restart(self._posted, self.waited)
        return True

    def _wait(self) -> bool:
        """Whether the CPU answers."""
        box, until = self.lane.mailbox, time.perf_counter() + self.lane.longest_job_s
        while int(box.answered[0]) < int(box.posted[0]):
            if not self.lane.healthy or time.perf_counter() > until:
                return False
            time.sleep(_GLANCE_S)
        return True

    def wait_on_host(self) -> None:
        """In a prompt's pass, where all experts of a layer may have to be read from the disk and no kernel is
        to wait that long: once what goes before the CPU's answer is issued, until that is there. Elsewhere
        the host issues what comes behind meanwhile, which is faster."""
        if not (self.brief and self.on):
            return
        if self.block.words.is_cuda:
            torch.cuda.current_stream(self.block.words.device).synchronize()
        self._wait()  # if it does not, the kernel that waits then will say so

    def _why_late(self, report: LaneReport) -> str:
        addresses = None if self._disk is None else self._disk.addresses
        return why_late(self.lane.mailbox, report.posted, addresses)

    def counters(self) -> LaneCounters:
        """Totals since the lane was made."""
        return self.lane.counters()

    def _give_up(self, reason: str) -> None:
        self.on = False
        if self.failure:
            return  # said already
        _LOG.warning("the CPU lane was given up: %s", reason)
        self.failure = reason
        if not self.needed:
            self.failure = f"the CPU lane was given up ({reason}); missing experts come over the link"

    def close(self) -> None:
        """End the threads."""
        self.lane.close()


def _lost(reason: str) -> HardwareError:
    return HardwareError(
        f"Experts on the disk come by the CPU's threads, which do not answer ({reason.rstrip('.')}): load "
        "the model again."
    )
