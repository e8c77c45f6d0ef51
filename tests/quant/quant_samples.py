"""A tiny model's experts, as the draft tests use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localmoe.core.types import ProgressCallback
from localmoe.kernels.codes import quantize_rtn
from localmoe.quant import DraftProvenance, DraftWriter, ExpertNaming, build_rtn_draft
from localmoe.quant.builder import estimate_bytes
from localmoe.quant.draft_writer import ExpertMatrices

NAMING = ExpertNaming("model.layers.{layer}.mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
CONFIG = {"model_type": "qwen2_moe", "hidden_size": 40, "nested": {"a": [1, 2]}}
FINGERPRINT = "f" * 64
HIDDEN, INTERMEDIATE = 40, 24  # neither is a multiple of the group size
GATE_SHAPE = (INTERMEDIATE, HIDDEN)
GROUP_SIZE = 16


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def provenance(base_model: str = "some/model", fingerprint: str = FINGERPRINT) -> DraftProvenance:
    return DraftProvenance.now(base_model, fingerprint, "rtn", GROUP_SIZE)


@dataclass
class Source:
    """Random experts; MoE layer 0 is decoder layer 1."""

    num_layers: int = 2
    num_experts: int = 3
    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE

    def decoder_layer(self, layer: int) -> int:
        return layer + 1

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        seed = 1000 * layer + 10 * expert
        gate = gaussian(self.intermediate, self.hidden, seed)
        up = gaussian(self.intermediate, self.hidden, seed + 1)
        return gate.bfloat16(), up.bfloat16(), gaussian(self.hidden, self.intermediate, seed + 2).bfloat16()


def writer_at(out: Path, recipe: DraftProvenance | None = None, needed_bytes: int = 1000) -> DraftWriter:
    """A writer of layers as `sample_layer` makes them."""
    return DraftWriter(out, CONFIG, NAMING, recipe or provenance(), needed_bytes)


def leave_after(out: Path, layers: int, error: type[BaseException] = KeyboardInterrupt) -> Path:
    """A build of three layers that a user stops after some; the folder that it leaves."""
    with pytest.raises(error), writer_at(out) as writer:
        for layer in range(layers):
            writer.add_layer(layer, sample_layer(layer))
        raise error
    return next(path for path in out.parent.iterdir() if path != out)


def names_in(folder: Path) -> set[str]:
    """Names of all that lies in a folder."""
    return {path.name for path in folder.iterdir()}


def weights_of(folder: Path) -> dict[str, bytes]:
    """The draft's weight files."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def sample_layer(layer: int, num_experts: int = 3, bits: int = 4) -> list[ExpertMatrices]:
    """The quantised experts of a layer of `Source`."""
    layers = []
    for expert in range(num_experts):
        gate, up, down = Source().matrices(layer, expert)
        matrices = [quantize_rtn(weight, bits, GROUP_SIZE) for weight in (gate, up, down)]
        layers.append((matrices[0], matrices[1], matrices[2]))
    return layers


def build(out: Path, source: Source | None = None, progress: ProgressCallback | None = None) -> Path:
    """A draft of `source` at `out`."""
    source = source or Source()
    needed_bytes = estimate_bytes(source, 4, GROUP_SIZE)
    with DraftWriter(out, CONFIG, NAMING, provenance(), needed_bytes) as writer:
        build_rtn_draft(source, writer, 4, GROUP_SIZE, progress=progress)
        return writer.publish()
