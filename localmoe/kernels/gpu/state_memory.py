"""What recurrent layers keep between passes, in device memory. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from localmoe.kernels.recurrent_shapes import RecurrentShape, ScanShape


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """Of a layer with a state of its own; see StateMemory.

    Attributes:
        state: float32 (value_heads, value_dim, key_dim), at the places' base (see state_places).
        mixed: (2, W, C), convolved rows of the log. norms: float32 (2, W, 2 key_heads), 1 over the lengths of
            queries and keys, of the delta rule alone. rates: float32 (2, W, R), how much is kept and how
            much corrected or added (ScanShape.rates).
        draft_state: behind the last drafted token. kept_state: where a pass was told to keep it.
    """

    state: Tensor
    mixed: Tensor
    norms: Tensor
    rates: Tensor
    draft_state: Tensor
    kept_state: Tensor


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Of one layer, or of L layers with a dimension in front of each.

    Attributes:
        raw: (2, taps - 1 + W, C), rows of the log before the convolution, the first ones of the tokens before
            its window.
        draft_raw: (taps - 1, C) of the tokens before the next drafted one.
        kept_raw: the same where a pass was told to keep them.
        scan: of a layer that has a state besides.
    """

    raw: Tensor
    draft_raw: Tensor
    kept_raw: Tensor
    scan: ScanMemory | None

    @classmethod
    def empty(
        cls, shape: RecurrentShape, layers: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> StateMemory:
        """Zeros, for windows of so many rows."""
        before, channels = shape.taps - 1, shape.channels

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, *size, dtype=dtype, device=device)

        scan = None
        if isinstance(shape, ScanShape):
            state = (shape.value_heads, shape.value_dim, shape.key_dim)
            scan = ScanMemory(
                state=zeros(*state),
                mixed=zeros(2, rows, channels, dtype=dtype),
                norms=zeros(2, rows, shape.norms),
                rates=zeros(2, rows, shape.rates),
                draft_state=zeros(*state),
                kept_state=zeros(*state),
            )
        return cls(
            raw=zeros(2, before + rows, channels, dtype=dtype),
            draft_raw=zeros(before, channels, dtype=dtype),
            kept_raw=zeros(before, channels, dtype=dtype),
            scan=scan,
        )

    def of_layer(self, layer: int) -> StateMemory:
        """A view."""
        scan = None if self.scan is None else ScanMemory(*(tensor[layer] for tensor in _tensors(self.scan)))
        return StateMemory(self.raw[layer], self.draft_raw[layer], self.kept_raw[layer], scan)

    def restore(self) -> None:
        """The state that was kept is the state again, in all layers."""
        if self.scan is not None:
            self.scan.state.copy_(self.scan.kept_state)
        before = self.kept_raw.shape[-2]
        self.raw[..., :before, :].copy_(self.kept_raw.unsqueeze(-3))

    @property
    def rows(self) -> int:
        """W."""
        return self.raw.shape[-2] - self.draft_raw.shape[-2]

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [self.raw, self.draft_raw, self.kept_raw, *([] if self.scan is None else _tensors(self.scan))]


def _tensors(scan: ScanMemory) -> list[Tensor]:
    return [getattr(scan, field.name) for field in fields(scan)]
