"""Find, check and load the draft of a model. Decides no quantisation method's details (quant
does)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localmoe.core.errors import DraftError, LoadCancelledError
from localmoe.core.types import ExpertKey, Progress, ProgressCallback
from localmoe.engine.draft_layers import DraftLayers, LayerReader
from localmoe.experts.record_store import RecordStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.model.draft_experts import DraftExpert
from localmoe.model.skeleton import Skeleton
from localmoe.quant.base_check import DraftBase, check_draft
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.expert_names import PROJECTION_NAMES, UNGATED_NAMES, ExpertNaming, find_naming

GROUP_SIZE = 128
DRAFT_BITS = 4


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What a loaded draft is. method: "RTN", "GPTQ", "NF4", or "synthetic" of random codes."""

    bits: int
    method: str
    group_size: int

    @property
    def codebook(self) -> bool:
        """Whether codes stand for the values of a table."""
        return self.method == "NF4"

    def __str__(self) -> str:
        kind = self.method if self.codebook else f"INT{self.bits} {self.method}"
        return f"{kind}, group {self.group_size}"


def expert_naming(checkpoint: Checkpoint, skeleton: Skeleton) -> ExpertNaming:
    """How this architecture names single experts: as its own checkpoint does, or, if that holds fused
    experts only, after the module path with gate_proj, if there is one, up_proj and down_proj."""
    found = find_naming(checkpoint.tensors, "weight")
    if found is not None:
        return found
    path, layer = skeleton.experts[0].path, skeleton.experts[0].decoder_layer
    template = re.sub(rf"\.{layer}\.", ".{layer}.", path, count=1) + ".{expert}"
    gated = skeleton.experts[0].layout.gated
    return ExpertNaming(template, *(PROJECTION_NAMES[0] if gated else (None, *UNGATED_NAMES)))


class HostExpertSource:
    """The loaded experts as plain (out, in) matrices, for a draft builder (quant.builder.ExpertSource)."""

    def __init__(self, skeleton: Skeleton, store: RecordStore) -> None:
        self._experts = skeleton.experts
        self._store = store
        self.num_layers = len(skeleton.experts)
        self.num_experts = skeleton.num_experts

    def decoder_layer(self, layer: int) -> int:
        """Index of the decoder layer that holds MoE layer `layer`."""
        return self._experts[layer].decoder_layer

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """gate (I, H), if there is one, up (I, H), down (H, I)."""
        gate_up, down = self._store.weights(ExpertKey(layer, expert))
        if self._experts[layer].layout.transposed:
            gate_up, down = gate_up.T.contiguous(), down.T.contiguous()
        if not self._experts[layer].layout.gated:
            return gate_up, down
        if self._experts[layer].module.is_concatenated:
            gate, up = gate_up.chunk(2)
        else:
            gate, up = gate_up[0::2], gate_up[1::2]
        return gate, up, down


def load_draft(
    folder: Path,
    skeleton: Skeleton,
    device: torch.device,
    *,
    base: DraftBase,
    packed: bool,
    fused: bool = True,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> tuple[DraftInfo, DraftLayers]:
    """What a draft folder holds, and its experts ready to compute: packed for the GPU's kernels, or
    [layer][expert]. fused: see LowBitLinear.

    Raises:
        DraftError: it is damaged, or belongs to another model than `base`.
        LoadCancelledError: `cancel` was set.
    """
    draft = DraftCheckpoint.open(folder)
    naming = draft.naming()
    check_draft(draft, base, naming)
    found = draft.reader(naming)
    matrices: list[list[DraftExpert]] = []
    layers: list[LowBitExperts] = []
    for done, experts in enumerate(skeleton.experts):
        if cancel is not None and cancel.is_set():
            raise LoadCancelledError("Loading the draft was cancelled.")
        if progress is not None:
            progress(Progress("Loading the draft", done, len(skeleton.experts), "layers"))
        reader = LayerReader(found, experts, skeleton.num_experts, device)
        if packed:
            layers.append(reader.packed())
        else:
            matrices.append(reader.matrices(fused=fused))
    return _info(draft), layers if packed else matrices


def _info(draft: DraftCheckpoint) -> DraftInfo:
    ready_made = "NF4" if draft.form.codebook else "GPTQ"
    method = draft.provenance.method.upper() if draft.provenance else ready_made
    return DraftInfo(draft.bits, method, draft.group_size)


def replace_draft(
    folder: Path,
    skeleton: Skeleton,
    device: torch.device,
    layers: DraftLayers,
    base: DraftBase,
    tick: Callable[[], None],
    *,
    fused: bool = True,
) -> DraftInfo:
    """Put the experts of a draft folder in the place of those that are loaded: on a GPU into the same memory,
    so that captured graphs read the new ones. 4-bit integers fit the memory of NF4 too, whose table they
    bring along. An interruption leaves some experts of both drafts, which changes no answer. `tick` is called
    before each layer, and may raise. fused: of one that is not packed, see LowBitLinear.

    Raises:
        DraftError: as `load_draft`; or the loaded draft's memory has no room for this one.
    """
    draft = DraftCheckpoint.open(folder)
    _check_room(draft, layers[0])
    naming = draft.naming()
    check_draft(draft, base, naming)
    found = draft.reader(naming)
    for layer, experts in enumerate(skeleton.experts):
        tick()
        reader = LayerReader(found, experts, skeleton.num_experts, device)
        loaded = layers[layer]
        if isinstance(loaded, LowBitExperts):
            reader.refill(loaded)
        else:
            loaded[:] = reader.matrices(fused=fused)
    return _info(draft)


def _check_room(draft: DraftCheckpoint, loaded: LowBitExperts | list[DraftExpert]) -> None:
    """Raises DraftError: the memory of a layer on a GPU is of another form."""
    if isinstance(loaded, LowBitExperts) and not loaded.takes(draft.form):
        raise DraftError(
            f"The draft in {draft.folder} is {_info(draft)} and cannot take the place of one in groups of "
            f"{loaded.group_size} while the model is loaded: load the model again."
        )
