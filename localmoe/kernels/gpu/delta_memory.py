"""What layers of linear attention keep between passes, in device memory. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from localmoe.kernels.delta_rule import DeltaShape


@dataclass(frozen=True, slots=True)
class DeltaMemory:
    """Of one layer, or of L layers with a dimension in front of each.

    Attributes:
        state: float32 (value_heads, value_dim, key_dim), at the places' base (see delta_places).
        raw: (2, taps - 1 + W, C), projected rows of the log, the first ones of the tokens before its window.
        mixed: (2, W, C), convolved ones. norms: float32 (2, W, 2 key_heads), 1 over the lengths of queries
            and keys. rates: float32 (2, W, 2, value_heads), decay and beta.
        draft_state, draft_raw: behind the last drafted token, and (taps - 1, C) of the tokens before.
        kept_state, kept_raw: the same where a pass was told to keep them.
    """

    state: Tensor
    raw: Tensor
    mixed: Tensor
    norms: Tensor
    rates: Tensor
    draft_state: Tensor
    draft_raw: Tensor
    kept_state: Tensor
    kept_raw: Tensor

    @classmethod
    def empty(
        cls, shape: DeltaShape, layers: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaMemory:
        """Zeros, for windows of so many rows."""
        before, channels = shape.taps - 1, shape.channels
        state = (shape.value_heads, shape.value_dim, shape.key_dim)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, *size, dtype=dtype, device=device)

        return cls(
            state=zeros(*state),
            raw=zeros(2, before + rows, channels, dtype=dtype),
            mixed=zeros(2, rows, channels, dtype=dtype),
            norms=zeros(2, rows, 2 * shape.key_heads),
            rates=zeros(2, rows, 2, shape.value_heads),
            draft_state=zeros(*state),
            draft_raw=zeros(before, channels, dtype=dtype),
            kept_state=zeros(*state),
            kept_raw=zeros(before, channels, dtype=dtype),
        )

    def of_layer(self, layer: int) -> DeltaMemory:
        """A view."""
        return DeltaMemory(*(tensor[layer] for tensor in self._tensors()))

    def restore(self) -> None:
        """The state that was kept is the state again, in all layers."""
        self.state.copy_(self.kept_state)
        before = self.kept_raw.shape[-2]
        self.raw[..., :before, :].copy_(self.kept_raw.unsqueeze(-3))

    @property
    def rows(self) -> int:
        """W."""
        return self.mixed.shape[-2]

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]
