"""Where a model's weights, draft and text come from: a checkpoint on this machine (sources) or random numbers
(random_source). Plans nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from localmoe.chat.prompt import Encoder
from localmoe.core.config import SamplingConfig
from localmoe.core.draft_config import DraftForm
from localmoe.core.types import ModelFootprint, ProgressCallback
from localmoe.engine.draft_layers import DraftLayers
from localmoe.engine.drafts import DraftInfo
from localmoe.experts.record_store import RecordStore
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.mtp_layer import MtpSkeleton
from localmoe.model.skeleton import Skeleton
from localmoe.model.synthetic import SyntheticModel
from localmoe.vision.source import VisionSource


class ModelSource(Protocol):
    """Everything about a model that does not depend on how it is run."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the host records."""

    def skeleton(self, dtype: torch.dtype) -> Skeleton:
        """The model without weights, to compute in `dtype`."""

    def can_keep_mxfp4(self, skeleton: Skeleton) -> bool:
        """Whether experts are published in MXFP4 and can be kept so."""

    def can_pack(self, skeleton: Skeleton) -> bool:
        """Whether experts can be kept in BF12, as far as is known before they are read."""

    def coded_form(self, skeleton: Skeleton) -> WeightForm | None:
        """In which of FP8, NVFP4 and INT4 experts are published and can be kept, likewise."""

    def can_pack_head(self, skeleton: Skeleton) -> bool:
        """Whether the output head can be, likewise."""

    def never_pack(self, *, head: bool = False, form: WeightForm = WeightForm.BF12) -> None:
        """Remember that they cannot be kept in this form, or the head cannot be packed."""

    def has_wide_matrices(self) -> bool:
        """Whether matrices are stored in more than `stored_dtype` holds."""

    def load_weights(
        self,
        skeleton: Skeleton,
        device: torch.device,
        *,
        ram_experts: int = 0,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> RecordStore:
        """Fill the skeleton's shared weights on `device`; the experts' records. ram_experts: so many of them
        in RAM at a time, and all in a file on the disk; 0: all in RAM."""

    def has_draft(self) -> bool:
        """Whether a draft lies in the default place, as far as names tell."""

    def draft_form(self, folder: Path | None) -> DraftForm:
        """Of the draft that `load_draft` would load."""

    def load_draft(
        self,
        skeleton: Skeleton,
        store: RecordStore,
        device: torch.device,
        folder: Path | None,
        *,
        packed: bool,
        fused: bool = True,
        may_build: bool = True,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> tuple[DraftInfo, DraftLayers]:
        """What it is, and the draft on `device`: that of `folder`, or the model's own. packed: for the GPU's
        kernels. fused: products by kernels that read codes, where not packed. may_build: if it is missing."""

    def has_mtp(self) -> bool:
        """Whether there is a layer that was trained to predict one token more."""

    def load_mtp(
        self,
        made: MtpSkeleton,
        device: torch.device,
        *,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> RecordStore:
        """Fill its shared weights on `device`; its experts' records."""

    def simulation(self, footprint: ModelFootprint) -> SyntheticModel | None:
        """What routes and accepts in a trained model's place; None if this is one."""

    def vision(self) -> VisionSource | None:
        """What reads pictures; None: nothing does."""

    def encoder(self, vocab_size: int, device: torch.device) -> Encoder:
        """What turns requests into token ids of a model that has so many, for an engine on a device."""

    def end_tokens(self, encoder: Encoder) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def own_sampling(self) -> SamplingConfig | None:
        """How its makers recommend to choose tokens; None: they do not."""


def can_have(source: ModelSource, skeleton: Skeleton, form: WeightForm) -> bool:
    """Whether experts can be in this form, as far as is known, which is none that all can be in."""
    return source.can_pack(skeleton) if form is WeightForm.BF12 else source.coded_form(skeleton) is form


def as_found(footprint: ModelFootprint, source: ModelSource, skeleton: Skeleton) -> ModelFootprint:
    """Without the forms that a load has found a model's weights cannot have."""
    if not source.can_pack(skeleton):
        footprint = replace(footprint, bf12_expert_bytes=0)
    if source.coded_form(skeleton) is None:
        footprint = replace(footprint, coded_expert_bytes=0, coded_form="")
    if not source.can_pack_head(skeleton):
        footprint = replace(footprint, head_saved_bytes=0)
    return footprint
