"""A draft's experts, layer by layer, from its files to what computes them: packed for the GPU's kernels, or
one by one. Chooses no draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from localmoe.core.errors import DraftError
from localmoe.kernels.codes import CodeMatrix
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_linear import LowBitLinear
from localmoe.model.draft_experts import DraftExpert
from localmoe.model.packed_draft import empty_layer, set_expert
from localmoe.model.skeleton import ExpertsModule
from localmoe.quant.expert_reader import ExpertMatrices, ExpertReader

DraftLayers = list[list[DraftExpert]] | list[LowBitExperts]  # [layer][expert], or packed layers


def packed_layers(draft: DraftLayers | None) -> list[LowBitExperts] | None:
    """A draft for the GPU's kernels."""
    return None if draft is None else [layer for layer in draft if isinstance(layer, LowBitExperts)]


def matrix_layers(draft: DraftLayers | None) -> list[list[DraftExpert]] | None:
    """[layer][expert] of a draft that is not packed."""
    return None if draft is None else [layer for layer in draft if not isinstance(layer, LowBitExperts)]


def draft_bytes(draft: DraftLayers | None) -> int:
    """Bytes of its experts on the device."""
    return sum(
        layer.num_bytes if isinstance(layer, LowBitExperts) else sum(expert.num_bytes for expert in layer)
        for layer in draft or ()
    )


@dataclass(frozen=True, slots=True)
class LayerReader:
    """One layer of a draft."""

    draft: ExpertReader
    experts: ExpertsModule
    num_experts: int
    device: torch.device

    def packed(self) -> LowBitExperts:
        """All its experts for the GPU's kernels. Codes are unpacked on the device, which for a moment
        takes less than two experts' 16-bit weights do (engine.rehearsal leaves room for that).

        Raises:
            DraftError: a tensor is damaged, or there is no kernel for them.
        """
        layer: LowBitExperts | None = None
        for expert, (gate_up, down) in enumerate(self._fused(self.device)):
            if layer is None:
                form, ordered = self.draft.form, not self.draft.act_order and gate_up.columns is None
                layer = empty_layer(
                    self.experts, self.num_experts, form.bits, form.group_size, self.device,
                    indexed=not ordered, codebook=form.codebook,
                )  # fmt: skip
            self._set(layer, expert, gate_up, down)
        assert layer is not None
        return layer

    def refill(self, layer: LowBitExperts) -> None:
        """Put them in the place of those that are there, with little memory of the device beside it.

        Raises:
            DraftError: as `packed`.
        """
        for expert, (gate_up, down) in enumerate(self._fused(None)):
            self._set(layer, expert, gate_up, down)

    def matrices(self, *, fused: bool = True) -> list[DraftExpert]:
        """Expert by expert, gate_up in the module's own order. fused: see LowBitLinear.

        Raises:
            DraftError: a tensor is damaged.
        """
        return [
            DraftExpert(
                LowBitLinear(gate_up, self.device, fused=fused), LowBitLinear(down, self.device, fused=fused)
            )
            for gate_up, down in self._fused(None, concatenated=bool(self.experts.module.is_concatenated))
        ]

    def _fused(
        self, device: torch.device | None, *, concatenated: bool = True
    ) -> Iterator[tuple[CodeMatrix, CodeMatrix]]:
        """gate_up and down of each expert in turn, their codes on `device`."""
        found = self.draft.layer(self.experts.decoder_layer, self.num_experts, self._sizes, device)
        # a map keeps nothing of an expert while the next one is read, as a loop's variables would
        return map(partial(_fuse, self.draft, concatenated), found)

    def _set(self, layer: LowBitExperts, expert: int, gate_up: CodeMatrix, down: CodeMatrix) -> None:
        try:
            set_expert(layer, expert, gate_up, down)
        except ValueError:
            raise DraftError(
                f"The draft in {self.draft.folder} cannot be used on this device: it says desc_act false, "
                f"and expert {expert} of layer {self.experts.decoder_layer} has its columns in another order "
                "(g_idx); correct its config, or build a draft with 'localmoe draft MODEL'."
            ) from None

    @property
    def _sizes(self) -> tuple[int, int]:
        """I and H."""
        layout = self.experts.layout
        down = layout.down_shape
        return (down[0], down[1]) if layout.transposed else (down[1], down[0])


def _fuse(draft: ExpertReader, concatenated: bool, expert: ExpertMatrices) -> tuple[CodeMatrix, CodeMatrix]:
    """One matrix with rows [gate; up], or of each in turn, or of up alone; and down.

    Raises:
        DraftError: the two have their columns in different orders.
    """
    gate, up = expert[0], expert[-2]  # the same where there is no gate
    same = gate.columns is up.columns
    if gate.columns is not None and up.columns is not None:
        same = torch.equal(gate.columns, up.columns)
    if not same:
        raise DraftError(
            f"The draft in {draft.folder} cannot be used: the gate and up projections of an expert have "
            "their input features in different orders (g_idx), which no kernel reads; choose a checkpoint "
            "with desc_act false, or build a draft with 'localmoe draft MODEL'."
        )
    return fused(expert, concatenated=concatenated)


def fused(expert: ExpertMatrices, *, concatenated: bool) -> tuple[CodeMatrix, CodeMatrix]:
    """gate_up, as in `_fuse`, of matrices whose columns are in one order, and down."""
    if len(expert) == 2:
        return expert[0], expert[1]
    gate, up, down = expert

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b]) if concatenated else torch.stack([a, b], dim=1).flatten(0, 1)

    return replace(gate, codes=join(gate.codes, up.codes), scales=join(gate.scales, up.scales)), down
