"""What of the machine is free now and what its rates are, so that every list can say whether a model fits.
The answer is engine.fit's; nothing here is guessed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from app.engine_status import EngineStatus
from app.files import write_json
from app.host_memory import HostMemory
from localmoe.core.config import EngineConfig
from localmoe.core.errors import LocalMoeError
from localmoe.core.model_facts import BudgetRange, Fit, ModelFacts
from localmoe.engine import import_all
from localmoe.hardware.facts import Gpu, Hardware
from localmoe.hardware.limits import measured_rates
from localmoe.hardware.probe import probe_hardware

LOOK_EVERY_S = 2.0
_GRAIN_BYTES = 256 << 20  # what changes by less changes no list
_WAIT_S = 0.5
_MOST = 1e18  # bytes a second; what is more is no measurement


class Fits:
    """`epoch` grows whenever an answer may have changed."""

    def __init__(
        self,
        path: Path,
        status: Callable[[], EngineStatus],
        config: Callable[[], EngineConfig],
        busy: Callable[[], bool],
        probe: Callable[..., Hardware] = probe_hardware,
    ) -> None:
        """
        Args:
            path: keeps what was measured, which another start need not measure again.
            status: of the loaded model, whose memory a load gives back.
            config: what the next load would use.
            busy: whether a measurement would disturb, or be disturbed.
        """
        self._path, self._status, self._config, self._busy, self._probe = path, status, config, busy, probe
        self._lock = threading.Lock()
        self._hardware: Hardware | None = None
        self._looked = float("-inf")
        self._measured: Hardware | None = None
        self._measuring = False
        self._key: object = None
        self._ended = threading.Event()
        self.epoch = 0

    def hardware(self) -> Hardware | None:
        """The machine with what would be free; None until the first look, which happens in the background."""
        self._refresh()
        with self._lock:
            return self._hardware

    def budgets(self, facts: ModelFacts, config: EngineConfig) -> BudgetRange | None:
        """Between which budgets one may choose; None until the machine is known, or where none works."""
        hardware = self.hardware()
        if hardware is None:
            return None
        import_all()  # `_measure` has, in its thread
        from localmoe.engine.fit import budget_range

        return budget_range(facts, hardware, config)

    def fit(
        self, facts: ModelFacts, *, download_bytes: int = 0, config: EngineConfig | None = None,
        on_disk: EngineConfig | None = None,
    ) -> Fit | None:  # fmt: skip
        """For the next load's settings, or others; None until the machine is known. on_disk: those with which
        a model is asked for once more that RAM alone refuses."""
        hardware = self.hardware()
        if hardware is None:
            return None
        if config is None:
            try:
                config = self._config()
            except LocalMoeError:
                config = EngineConfig()
        with self._lock:
            measured = self._measured
        rates = None
        if measured is not None:
            rates = measured_rates(
                measured, device="cuda" if hardware.gpus else "cpu",
                emulated_link_bytes_per_s=config.emulated_link_bytes_per_s,
            )  # fmt: skip
        import_all()
        from localmoe.engine.fit import fit_model, fit_or_from_disk

        if on_disk is not None:
            return fit_or_from_disk(facts, hardware, rates, config, on_disk, download_bytes=download_bytes)
        return fit_model(facts, hardware, rates, config, download_bytes=download_bytes)

    @property
    def measured(self) -> bool:
        """Whether the machine's rates are known, so that speeds can be predicted."""
        with self._lock:
            return self._measured is not None

    def close(self) -> None:
        """End the wait for a quiet moment."""
        self._ended.set()

    def _refresh(self) -> None:
        """Look again if it is time to; the first look and the measurement take seconds and have a thread."""
        with self._lock:
            if not self._measuring:
                self._measuring = True
                threading.Thread(target=self._measure, name="machine", daemon=True).start()
            if self._hardware is None or time.monotonic() - self._looked < LOOK_EVERY_S:
                return
            self._looked = time.monotonic()
        self._look()

    def _look(self) -> None:
        status = self._status()
        hardware = self._probe(measure=False)
        if status.plan is not None:
            held, plan = sum(status.memory.values()), status.plan
            on_gpu = bool(hardware.gpus) and (status.info is None or status.info.device != "cpu")
            ram = plan.host_bytes if on_gpu else plan.host_bytes + held
            if plan.disk_bytes:  # room for experts takes RAM once they are read into it
                ram = min(ram, HostMemory.now().own)
            import_all()
            from localmoe.engine.fit import with_given_back

            hardware = with_given_back(hardware, held if on_gpu else 0, ram)
        config: object
        try:
            config = self._config()
        except LocalMoeError as error:
            config = str(error)
        free = (
            hardware.ram_available_bytes,
            hardware.disk_free_bytes,
            hardware.home_free_bytes or 0,
            *(g.free_bytes for g in hardware.gpus),
        )
        with self._lock:
            key = (config, self._measured, *(round(one / _GRAIN_BYTES) for one in free))
            if key != self._key or self._hardware is None:
                self._key, self._hardware = key, hardware
                self.epoch += 1

    def _measure(self) -> None:
        """Look, then take the rates from the file, or measure them in the first quiet moment."""
        import_all()
        self._look()
        with self._lock:
            hardware = self._hardware
        assert hardware is not None
        kept = self._read(hardware)
        while kept is None and self._busy():
            if self._ended.wait(_WAIT_S):
                return
        if kept is None:
            kept = self._probe(measure=True)
            self._write(kept)
        with self._lock:
            self._measured = kept
        self._look()

    def _read(self, hardware: Hardware) -> Hardware | None:
        """What was measured on this very machine before."""
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            gpus = tuple(
                Gpu(**{**gpu, "compute_capability": tuple(gpu["compute_capability"])})
                for gpu in values["gpus"]
            )
            kept = Hardware(**{**values, "gpus": gpus, "cpu_flags": tuple(values["cpu_flags"])})
            device: Literal["cpu", "cuda"] = "cuda" if hardware.gpus else "cpu"
            rates = measured_rates(kept, device=device)
            known = rates is not None and 0 < rates.device_bytes_per_s < _MOST > rates.link_bytes_per_s > 0
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return kept if known and _machine(kept) == _machine(hardware) else None

    def _write(self, measured: Hardware) -> None:
        try:
            write_json(self._path, replace(measured).as_dict())
        except OSError:
            return  # measured again by the next start


def _machine(hardware: Hardware) -> tuple[object, ...]:
    names = tuple((gpu.name, gpu.total_bytes) for gpu in hardware.gpus)
    return hardware.cpu_name, hardware.logical_cores, hardware.ram_total_bytes, names
