"""Compile a model's kernels while its weights are read, so that a first start takes no longer for it: on a
twin of the model, in threads of their own. Decides whether that pays; what goes wrong here costs time alone,
since what is missing is compiled later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import LoadCancelledError, sentence_of
from localmoe.engine.lanes import why_not
from localmoe.engine.mtp_drafts import MtpShape
from localmoe.engine.planning import PreparedModel
from localmoe.engine.twin import Twin
from localmoe.hardware.cpu import core_counts

if TYPE_CHECKING:  # it needs Triton
    from localmoe.kernels.gpu.compiled_stamp import CompiledStamp

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1
_LEAST_PROCESSES = 3  # with fewer, threads have compiled as much by the time that the processes have begun


@contextmanager
def rehearsing(prepared: PreparedModel, config: EngineConfig) -> Iterator[Rehearsal]:
    """Compile beside what is done inside, if it pays; at the end nothing runs any more."""
    twin, stamp = None, None
    try:
        stamp = _missing_stamp(prepared, config)
        twin = None if stamp is None else _twin(prepared, config)
    except Exception as error:  # a model's own code may fail in any way
        _LOG.info("kernels are not compiled while weights are read: %s", sentence_of(error))
    rehearsal = Rehearsal(twin)
    try:
        yield rehearsal
        if stamp is not None and rehearsal.wait():
            stamp.leave()  # else a CPU lane that is tried and does not pay would be rehearsed every time
    finally:
        rehearsal.close()


class Rehearsal:
    """Threads that compile what a model will run; none without a twin of it."""

    def __init__(self, twin: Twin | None) -> None:
        self._stop = threading.Event()
        self._compiled = False
        self._threads: list[threading.Thread] = []
        if twin is None:
            return
        device = torch.cuda.current_device() if twin.prepared.compute.device.type == "cuda" else None
        self._begin("passes", lambda: self._compile_passes(twin, device))
        if twin.lane:
            self._begin("cpu-lane", lambda: twin.compile_lane(self._stop))

    def _begin(self, name: str, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except Exception as error:  # it is compiled where it is first wanted, and refused there
                level = logging.DEBUG if self._stop.is_set() else logging.INFO
                _LOG.log(level, "compiling %s ahead ended early: %s", name, sentence_of(error))

        thread = threading.Thread(target=run, name=f"rehearse-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _compile_passes(self, twin: Twin, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        with _elsewhere() if device is not None else nullcontext():
            twin.compile_passes(self._stop)
        self._compiled = True

    def wait(self, cancel: threading.Event | None = None) -> bool:
        """Wait until all is compiled and its memory given back; whether the passes' kernels are compiled.

        Raises:
            LoadCancelledError: `cancel` was set.
        """
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_POLL_S)
                if cancel is not None and cancel.is_set():
                    raise LoadCancelledError("Loading the model was cancelled.")
        return self._compiled

    def close(self) -> None:
        """End early; what is under way, some seconds, is waited for."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def _elsewhere() -> Iterator[None]:
    """What is compiled inside is compiled by other processes, where there are cores for them."""
    from localmoe.kernels.gpu.compile_processes import CompileProcesses
    from localmoe.kernels.gpu.launch import THREADS, compiled_by

    number = min(THREADS, core_counts()[0])
    if number < _LEAST_PROCESSES or not CompileProcesses.can_be_had():
        yield
        return
    with CompileProcesses(number) as processes, compiled_by(processes):
        yield


def _missing_stamp(prepared: PreparedModel, config: EngineConfig) -> CompiledStamp | None:
    """Of passes as they will probably be; None where nothing is to be compiled."""
    compute = prepared.compute
    if compute.device.type != "cuda" or not compute.whole_passes:
        return None
    from localmoe.model.device_stamp import stamp_of

    stamp = stamp_of(
        prepared.skeleton.model.config, compute.dtype, compute.device,
        form=prepared.skeleton.experts[0].layout.form,
        context=prepared.plan.context, draft=_draft_form(prepared, config),
        lane=lane_is_likely(prepared, config), synthetic=prepared.synthetic,
        packed=len(prepared.skeleton.packed_keys), mtp=isinstance(prepared.draft_model, MtpShape),
    )  # fmt: skip
    return None if stamp.is_there() else stamp


def _twin(prepared: PreparedModel, config: EngineConfig) -> Twin | None:
    """What to rehearse; None where the budget has no room for it."""
    plan, lane = prepared.plan, lane_is_likely(prepared, config)
    twin = Twin.of(prepared, _draft_form(prepared, config), lane=lane)
    # is taken when the rehearsal is over; the draft's codes, unpacked meanwhile, take less than two slots
    room = (plan.num_slots - 2) * plan.slot_bytes + plan.kv_bytes
    if twin.num_bytes > room:
        _LOG.debug("no room to compile while weights are read: %d of %d bytes", twin.num_bytes, room)
        return None
    _import_compilers(lane=lane)
    return twin


def _draft_form(prepared: PreparedModel, config: EngineConfig) -> DraftForm | None:
    if prepared.plan.drafting and prepared.draft_model is None:
        return prepared.source.draft_form(config.draft_dir)
    return None


def lane_is_likely(prepared: PreparedModel, config: EngineConfig) -> bool:
    """Whether make_lane will try a CPU lane; it may still find that none pays."""
    layouts = [experts.layout for experts in prepared.skeleton.experts]
    return not why_not(prepared.compute.device, layouts, config)


def _import_compilers(*, lane: bool) -> None:
    """Here, since threads that import at once may see halves of modules."""
    import localmoe.model.device_modules
    import localmoe.model.device_runner
    import localmoe.model.device_takeover

    if lane:
        import localmoe.experts.lane_code  # noqa: F401
