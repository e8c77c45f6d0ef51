"""A tiny model's experts, as the draft tests use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localmoe.core.types import ProgressCallback
from localmoe.quant import DraftProvenance, ExpertNaming, build_rtn_draft

NAMING = ExpertNaming("model.layers.{layer}.mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
CONFIG = {"model_type": "qwen2_moe", "hidden_size": 40, "nested": {"a": [1, 2]}}
FINGERPRINT = "f" * 64
HIDDEN, INTERMEDIATE = 40, 24  # neither is a multiple of the group size
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


def build(out: Path, source: Source | None = None, progress: ProgressCallback | None = None) -> Path:
    """A draft of `source` at `out`."""
    return build_rtn_draft(
        source or Source(),
        out,
        config=CONFIG,
        naming=NAMING,
        base_model="some/model",
        base_fingerprint=FINGERPRINT,
        group_size=GROUP_SIZE,
        progress=progress,
    )
