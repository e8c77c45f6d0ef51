"""All routed experts in host RAM, in the checkpoint's own dtype: one page-aligned record an expert.

Memory is anonymous mmap (page-aligned, committed when written) and, for a GPU, registered in place so that
copies run at full link speed. Decides nothing about what is copied.
"""

from __future__ import annotations

import mmap
from types import TracebackType

import torch
from torch import Tensor

from localmoe.core.errors import HardwareError
from localmoe.core.types import ExpertKey
from localmoe.core.units import format_bytes
from localmoe.experts.records import PAGE_BYTES, RecordLayout


class HostStore:
    """Records of `num_layers` x `num_experts` experts; `layouts` has one entry a MoE layer."""

    def __init__(self, layouts: list[RecordLayout], num_experts: int, dtype: torch.dtype) -> None:
        self.layouts = layouts
        self.num_experts = num_experts
        self.dtype = dtype
        self._registered: list[int] = []
        self._layers = [self._allocate(layout) for layout in layouts]

    def _allocate(self, layout: RecordLayout) -> Tensor:
        stride = -(-layout.num_bytes(self.dtype) // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, stride * self.num_experts)  # kept alive by the tensor
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.num_experts, stride)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return sum(layer.numel() for layer in self._layers)

    def record(self, key: ExpertKey) -> Tensor:
        """(elements,) flat weights of one expert."""
        layout = self.layouts[key.layer]
        raw = self._layers[key.layer][key.expert, : layout.num_bytes(self.dtype)]
        return raw.view(self.dtype)

    def views(self, key: ExpertKey) -> tuple[Tensor, Tensor]:
        """(gate_up, down) of one expert, writable."""
        return self.layouts[key.layer].views(self.record(key))

    def pin(self) -> None:
        """Register the records with the CUDA driver, in place.

        Raises:
            HardwareError: the driver refuses (usually the locked-memory limit).
        """
        runtime = torch.cuda.cudart()
        for layer in self._layers:
            code = int(runtime.cudaHostRegister(layer.data_ptr(), layer.numel(), 0))
            if code != 0:
                wanted = format_bytes(self.num_bytes)
                self.close()
                raise HardwareError(
                    f"The CUDA driver refused to pin {wanted} of host memory "
                    f"(error {code}): close other programs or choose a smaller model."
                )
            self._registered.append(layer.data_ptr())

    def close(self) -> None:
        """Unregister pinned memory and let go of the records; memory in use elsewhere goes with its last
        view."""
        for pointer in self._registered:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._registered.clear()
        self._layers = []

    def __enter__(self) -> HostStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
