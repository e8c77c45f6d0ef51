"""Tiny models loaded for a GPTQ build, and builds that can be looked into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localmoe.core.draft_config import GptqSettings
from localmoe.core.types import Progress
from localmoe.engine.drafts import HostExpertSource, expert_naming
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels.codes import CodeMatrix, dequantize
from localmoe.model import gptq_build
from localmoe.model.expert_module import weight_names
from localmoe.model.gptq_build import GptqBuild
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import Skeleton, build_skeleton
from localmoe.quant.builder import estimate_bytes
from localmoe.quant.calibrated_layer import CalibratedLayer, LayerTokens, QuantizedExpert
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.draft_format import DraftProvenance
from localmoe.quant.draft_writer import DraftWriter

CPU = torch.device("cpu")
ROOMY = 1 << 33
SETTINGS = GptqSettings(num_tokens=640, sequence_length=40)
TOKENS = torch.randint(6, 250, (16, 40), generator=torch.Generator().manual_seed(0))


@dataclass
class Loaded:
    """A model folder's weights in RAM."""

    checkpoint: Checkpoint
    skeleton: Skeleton
    store: HostStore

    @classmethod
    def of(cls, folder: Path) -> Loaded:
        checkpoint = Checkpoint.open(folder)
        skeleton = build_skeleton(checkpoint, torch.float32)
        return cls(checkpoint, skeleton, load_weights(skeleton, checkpoint, device=CPU))

    def writer(self, out: Path, **options: Any) -> DraftWriter:
        source = HostExpertSource(self.skeleton, self.store)
        provenance = DraftProvenance.now("tiny", "f" * 64, "gptq", 128)
        naming = expert_naming(self.checkpoint, self.skeleton)
        needed = estimate_bytes(source, 4, 128)
        return DraftWriter(out, self.checkpoint.config, naming, provenance, needed, **options)

    def build(self, settings: GptqSettings = SETTINGS, budget: int = ROOMY) -> GptqBuild:
        return GptqBuild(self.skeleton, self.store, TOKENS, settings, CPU, budget)


def built(
    folder: Path,
    out: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
    pause: Callable[[], None] | None = None,
    budget: int = ROOMY,
    **writing: Any,
) -> Path:
    """The whole draft of a model folder."""
    loaded = Loaded.of(folder)
    try:
        with loaded.writer(out, **writing) as writer:
            loaded.build(budget=budget).run(writer, progress=progress, cancel=cancel, pause=pause)
            return writer.publish()
    finally:
        loaded.store.close()


@dataclass
class Seen:
    """What a build's layers were given and gave, MoE layer after MoE layer."""

    tokens: list[LayerTokens]
    budgets: list[int]
    experts: list[list[QuantizedExpert]]
    outputs: list[Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Of the builds of this test."""
    noted = Seen([], [], [], [])

    class Watched(CalibratedLayer):
        def __init__(self, tokens: LayerTokens, weights: Any, settings: GptqSettings, budget: int) -> None:
            super().__init__(tokens, weights, settings, budget)
            noted.tokens.append(tokens)
            noted.budgets.append(budget)
            noted.outputs.append(self.outputs)

        def experts(self, tick: Callable[[], None]) -> Iterator[QuantizedExpert]:
            noted.experts.append([])
            for expert in super().experts(tick):
                noted.experts[-1].append(expert)
                yield expert

    monkeypatch.setattr(gptq_build, "CalibratedLayer", Watched)
    return noted


def filled_with_draft(model: Any, skeleton: Skeleton, draft: Path) -> None:
    """Put a draft's weights in the place of transformers' own."""
    opened = DraftCheckpoint.open(draft)
    naming = opened.naming()

    def plain(matrix: CodeMatrix) -> Tensor:
        return dequantize(matrix, torch.float32)

    for experts in skeleton.experts:
        module = model.get_submodule(experts.path)
        down = experts.layout.down_shape
        inner, hidden = down if experts.layout.transposed else down[::-1]
        found = opened.reader(naming).layer(experts.decoder_layer, skeleton.num_experts, (inner, hidden))
        first, second = (getattr(module, name).data for name in weight_names(module))
        for index, matrices in enumerate(found):
            *parts, below = (plain(matrix) for matrix in matrices)
            gate_up = torch.cat(parts) if module.is_concatenated else torch.stack(parts, 1).flatten(0, 1)
            turned = experts.layout.transposed
            first[index] = gate_up.T if turned else gate_up
            second[index] = below.T if turned else below
