"""Which expert of the next layer the CPU lane will likely get, told to it while it has time to fetch: what
the next layer's router makes of this layer's input, since each layer adds little to the residual stream.
Changes nothing that is computed, and fetches nothing (kernels.cpu.fetch_ahead does).

Beside windows of one token only: longer ones keep the CPU busy for many times as long as attention takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localmoe.kernels.gpu.lane_kernels import foretell
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.residency import ResidencyView
from localmoe.model.next_gate import Gate
from localmoe.model.side_stream import SideStream


class Foresight:
    """Of one model's layers; its work runs beside theirs."""

    def __init__(self, gates: Sequence[Gate | None], device: torch.device) -> None:
        """gates: the router of each MoE layer; None: nothing is foretold of the layer."""
        self._gates = gates
        self._side = SideStream(device)

    def tell(
        self, layer: int, hidden: Tensor, residency: ResidencyView, lane: LaneView, forced: Tensor | None
    ) -> bool:
        """Foretell layer number `layer` from the input (T, H) of the one before, whose job is grouped.

        Args:
            residency: of `layer`. lane: of the layer before.
            forced: int64 (T, K), what a simulation says in the router's place.

        Returns:
            Whether something runs beside the layer, which `join` has to wait for.
        """
        gate = self._gates[layer] if layer < len(self._gates) else None
        if gate is None or hidden.shape[0] != 1:
            return False
        with self._side:
            weights, experts = gate(hidden)
            foretell(experts if forced is None else forced, weights, residency, lane, layer)
        return True

    def join(self) -> None:
        """What is issued from here on starts after what was told."""
        self._side.join()
