"""Reads single experts of a model that is published in MXFP4 as a draft's matrices: they are the model's own
weights. Chooses no draft."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import CheckpointError, DraftError
from localmoe.hub.safetensors_header import TensorHeader
from localmoe.kernels.codes import CodeMatrix
from localmoe.quant.expert_reader import ExpertMatrices, OpenFile
from localmoe.quant.mxfp4 import BLOCK_BYTES, FORM, check_layout, parameter_of, scales_of, unpack

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Mxfp4Reader:
    """The experts among a checkpoint's tensors (engine.draft_layers.MatrixReader).

    Attributes:
        folder: for errors.
        tensors: headers by name.
        interleaved: whether gate's and up's rows alternate.
    """

    folder: Path
    tensors: Mapping[str, TensorHeader]
    interleaved: bool

    @property
    def form(self) -> DraftForm:
        """What its experts take in memory."""
        return FORM

    @property
    def act_order(self) -> bool:
        """Columns are in order."""
        return False

    def layer(
        self,
        decoder_layer: int,
        num_experts: int,
        gate_shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> Iterator[ExpertMatrices]:
        """As ExpertReader.layer.

        Raises:
            DraftError: a tensor is missing, of another shape, or cannot be read.
        """
        inner, hidden = gate_shape
        gate_up = self._found("gate_up_proj", decoder_layer, (num_experts, 2 * inner, hidden))
        down = self._found("down_proj", decoder_layer, (num_experts, hidden, inner))
        with OpenFile(self.folder) as file:
            for expert in range(num_experts):
                yield self._matrices(file, gate_up, down, expert, device)

    def _matrices(
        self, file: OpenFile, gate_up: _Stored, down: _Stored, expert: int, device: torch.device | None
    ) -> ExpertMatrices:
        both = gate_up.matrix(file, expert, device)
        rows = both.out_features
        cut = [slice(0, rows, 2), slice(1, rows, 2)]
        if not self.interleaved:
            cut = [slice(0, rows // 2), slice(rows // 2, rows)]
        gate, up = (replace(both, codes=both.codes[part], scales=both.scales[part]) for part in cut)
        return gate, up, down.matrix(file, expert, device)

    def _found(self, part: str, decoder_layer: int, rows: tuple[int, int, int]) -> _Stored:
        for name, header in self.tensors.items():
            layer = _LAYER.search(name)
            if parameter_of(name).endswith(f".{part}") and layer and int(layer.group(1)) == decoder_layer:
                try:
                    return _Stored(header, check_layout(header, self.tensors.get(scales_of(name)), rows))
                except CheckpointError as error:
                    raise DraftError(f"{error}") from error
        raise DraftError(
            f"The experts of layer {decoder_layer} in {self.folder} are not stored in MXFP4 as its config "
            "says: download the model again."
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A matrix of all experts: blocks (E, N, G, 16) and scales (E, N, G)."""

    blocks: TensorHeader
    scales: TensorHeader

    def matrix(self, file: OpenFile, expert: int, device: torch.device | None) -> CodeMatrix:
        """One expert's, in memory of its own."""
        shape = self.scales.shape[1:]
        blocks = _read(file, self.blocks, expert).view(*shape, BLOCK_BYTES)
        scales = _read(file, self.scales, expert).view(*shape)
        return unpack(blocks if device is None else blocks.to(device), scales)


def _read(file: OpenFile, header: TensorHeader, expert: int) -> Tensor:
    """Its bytes."""
    num_bytes = header.num_bytes // header.shape[0]
    part = replace(header, num_bytes=num_bytes, offset=header.offset + expert * num_bytes)
    return torch.frombuffer(file.read(part), dtype=torch.uint8)
