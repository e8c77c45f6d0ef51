"""What is known of a machine, as plain values. Detects and measures nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, numbered as torch numbers it.

    Attributes:
        free_bytes: what can be allocated now.
        driver_used_bytes: in use on the whole device, by any process, the display and the driver; None if
            the driver does not tell.
        pcie_generation, pcie_width: the best that card and slot can do together; None if unknown.
        h2d_bytes_per_s: measured copy from pinned host memory; None if not measured.
        device_bytes_per_s: measured traffic (bytes read plus bytes written) of a copy within the device;
            None if not measured.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    driver_used_bytes: int | None
    compute_capability: tuple[int, int]
    pcie_generation: int | None
    pcie_width: int | None
    h2d_bytes_per_s: float | None
    device_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as this process may use it (container limits and CPU affinity applied).

    Attributes:
        gpus: CUDA devices that torch can use; `gpu_note` says why there are none if the reason is known.
        cpu_flags: those of avx2, avx512f, avx512_bf16 and amx_tile that the CPU has.
        disk_free_bytes: on the disk of localmoe's own models.
        home_free_bytes: on that of what is made of models, if it is another one.
        memory_copy_bytes_per_s: measured bytes copied a second from RAM to RAM by torch with its own number
            of threads (each byte is read and written once); None if not measured.
    """

    gpus: tuple[Gpu, ...]
    gpu_note: str
    cpu_name: str
    physical_cores: int
    logical_cores: int
    cpu_flags: tuple[str, ...]
    ram_total_bytes: int
    ram_available_bytes: int
    disk_free_bytes: int
    memory_copy_bytes_per_s: float | None
    platform: str
    python_version: str
    torch_version: str
    home_free_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for --json."""
        return asdict(self)
