"""Find, check, build and load the INT4 draft of a model. Decides no quantisation method's details (quant
does)."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from localmoe.core.errors import DraftError, LoadCancelledError
from localmoe.core.types import ExpertKey, Progress, ProgressCallback
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels.int4 import Int4Linear, QuantizedMatrix
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.model.experts_runtime import DraftExpert
from localmoe.model.packed_draft import empty_layer
from localmoe.model.skeleton import ExpertsModule, Skeleton
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.draft_writer import ExpertNaming

GROUP_SIZE = 128
DraftLayers = list[list[DraftExpert]] | list[LowBitExperts]  # [layer][expert], or packed layers
_EXPERT_TENSOR = re.compile(
    r"(?P<prefix>.*layers\.)\d+(?P<middle>\..*experts\.)\d+\.(?P<projection>\w+)\.weight"
)
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def expert_naming(checkpoint: Checkpoint, skeleton: Skeleton) -> ExpertNaming:
    """How this architecture names single experts: as its own checkpoint does, or, if that holds fused
    experts only, after the module path with gate_proj, up_proj and down_proj."""
    found: Counter[tuple[str, str]] = Counter()
    projections: set[str] = set()
    for name in checkpoint.tensors:
        match = _EXPERT_TENSOR.fullmatch(name)
        if match:
            found[match["prefix"], match["middle"]] += 1
            projections.add(match["projection"])
    names = next((names for names in _PROJECTIONS if projections.issuperset(names)), None)
    if names is None:
        path = skeleton.experts[0].path
        layer = skeleton.experts[0].decoder_layer
        template = re.sub(rf"\.{layer}\.", ".{layer}.", path, count=1) + ".{expert}"
        return ExpertNaming(template, *_PROJECTIONS[0])
    (prefix, middle), _ = found.most_common(1)[0]
    return ExpertNaming(f"{prefix}{{layer}}{middle}{{expert}}", *names)


class HostExpertSource:
    """The loaded experts as plain (out, in) matrices, for a draft builder (quant.builder.ExpertSource)."""

    def __init__(self, skeleton: Skeleton, store: HostStore) -> None:
        self._experts = skeleton.experts
        self._store = store
        self.num_layers = len(skeleton.experts)
        self.num_experts = skeleton.num_experts

    def decoder_layer(self, layer: int) -> int:
        """Index of the decoder layer that holds MoE layer `layer`."""
        return self._experts[layer].decoder_layer

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate (I, H), up (I, H), down (H, I)."""
        gate_up, down = self._store.views(ExpertKey(layer, expert))
        if self._experts[layer].layout.transposed:
            gate_up, down = gate_up.T.contiguous(), down.T.contiguous()
        if self._experts[layer].module.is_concatenated:
            gate, up = gate_up.chunk(2)
        else:
            gate, up = gate_up[0::2], gate_up[1::2]
        return gate, up, down


def load_draft(
    folder: Path,
    naming: ExpertNaming,
    skeleton: Skeleton,
    device: torch.device,
    *,
    fingerprint: str,
    model_name: str,
    packed: bool,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> tuple[str, DraftLayers]:
    """Description of a draft folder, and its experts ready to compute: packed for the GPU's kernels, or
    [layer][expert].

    Raises:
        DraftError: it is damaged, or belongs to another model.
        LoadCancelledError: `cancel` was set.
    """
    draft = DraftCheckpoint.open(folder)
    draft.check_base(fingerprint, model_name)
    matrices: list[list[DraftExpert]] = []
    layers: list[LowBitExperts] = []
    for done, experts in enumerate(skeleton.experts):
        if cancel is not None and cancel.is_set():
            raise LoadCancelledError("Loading the draft was cancelled.")
        if progress is not None:
            progress(Progress("Loading the draft", done, len(skeleton.experts), "layers"))
        pairs = (_load_expert(draft, naming, experts, i, packed=packed) for i in range(skeleton.num_experts))
        if packed:
            layers.append(empty_layer(experts, skeleton.num_experts, draft.bits, draft.group_size, device))
            for expert, (gate_up, down) in enumerate(pairs):
                layers[-1].set_expert(expert, gate_up, down)
        else:
            matrices.append([DraftExpert(Int4Linear(a, device), Int4Linear(b, device)) for a, b in pairs])
    method = draft.provenance.method.upper() if draft.provenance else "GPTQ"
    return f"INT{draft.bits} {method}, group {draft.group_size}", layers if packed else matrices


def _load_expert(
    draft: DraftCheckpoint, naming: ExpertNaming, experts: ExpertsModule, expert: int, *, packed: bool
) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    """gate_up, packed as [gate; up] and else in the module's own order, and down."""
    layout = experts.layout
    gate_up_shape, down_shape = layout.gate_up_shape, layout.down_shape
    if layout.transposed:
        gate_up_shape, down_shape = gate_up_shape[::-1], down_shape[::-1]
    half = (gate_up_shape[0] // 2, gate_up_shape[1])
    gate = draft.matrix(naming, experts.decoder_layer, expert, "gate", half)
    up = draft.matrix(naming, experts.decoder_layer, expert, "up", half)
    down = draft.matrix(naming, experts.decoder_layer, expert, "down", down_shape)
    if gate.group_size != up.group_size:
        raise DraftError(f"Gate and up of expert {expert} have different group sizes: build the draft again.")
    return _fuse(gate, up, interleaved=not packed and not experts.module.is_concatenated), down


def _fuse(gate: QuantizedMatrix, up: QuantizedMatrix, *, interleaved: bool) -> QuantizedMatrix:
    """One matrix whose output rows are in the order of the module's gate_up."""

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b], dim=1).flatten(0, 1) if interleaved else torch.cat([a, b])

    return QuantizedMatrix(
        join(gate.codes, up.codes), join(gate.scales, up.scales), gate.in_features, gate.group_size
    )
