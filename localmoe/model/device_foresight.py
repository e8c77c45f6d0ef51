"""Which expert of the next layer is likely to be missing, told while there is time to fetch it: what the next
layer's router makes of this layer's input, since each layer adds little to the residual stream. With the CPU
lane its threads fetch it into their caches (kernels.cpu.fetch_ahead). Without, a part of it is copied into
the stage between the two layers' experts, when the link would have nothing to do (kernels.gpu.copy_ahead);
beside the CPU that was measured to gain nothing. Changes nothing that is computed.

Beside windows of one token only: longer ones keep CPU and link busy for many times as long as attention
takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localmoe.experts.stage_block import StageBlock
from localmoe.kernels.gpu.copy_ahead import copy_ahead
from localmoe.kernels.gpu.foretelling import foretell
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.residency import ResidencyView
from localmoe.kernels.stage import StageView
from localmoe.model.next_gate import Gate
from localmoe.model.side_stream import SideStream


class Foresight:
    """Of one model's layers; its work runs beside theirs."""

    def __init__(
        self,
        gates: Sequence[Gate | None],
        device: torch.device,
        stage: StageBlock | None = None,
    ) -> None:
        """
        Args:
            gates: the router of each MoE layer; None: nothing is foretold of the layer.
            stage: None: nothing is copied ahead.
        """
        self._gates = gates
        self._side = SideStream(device)
        self._stage = stage
        self._to_copy: tuple[StageView, ResidencyView] | None = None

    def stage_of(self, layer: int) -> StageView | None:
        """What the layer may find copied ahead, if it takes no CPU lane."""
        return None if self._stage is None else self._stage.view(layer)

    def begin(self) -> None:
        """A pass begins; the one before may have been interrupted."""
        self._to_copy = None

    def tell(
        self,
        layer: int,
        hidden: Tensor,
        residency: ResidencyView,
        lane: LaneView | None,
        forced: Tensor | None,
    ) -> None:
        """Foretell layer number `layer` from the input (1, H) of the one before, whose job is grouped;
        nothing where it has no known router, or nobody would fetch.

        Args:
            residency: of `layer`.
            lane: of the layer before; None: it takes no CPU lane.
            forced: int64 (1, K), what a simulation says in the router's place.
        """
        gate = self._gates[layer] if layer < len(self._gates) else None
        stage = self.stage_of(layer) if lane is None else None
        if gate is None or (lane is None and stage is None):
            return
        with self._side:
            weights, experts = gate(hidden)
            foretell(experts if forced is None else forced, weights, residency, layer, lane=lane, stage=stage)
        if stage is not None:
            self._to_copy = stage, residency

    def use_link(self) -> None:
        """The layer at hand has read all that it needs: what was foretold may follow over the link, beside
        all that is issued from here on. That starts after what was told."""
        self._side.join()
        if self._to_copy is not None:
            stage, residency = self._to_copy
            self._to_copy = None
            with self._side:
                copy_ahead(stage, residency)
