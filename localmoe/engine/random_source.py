"""A model of a real one's shape with random weights, in a checkpoint's place (model_source.ModelSource)."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from localmoe.chat.prompt import Encoder, TokenEncoder
from localmoe.core.draft_config import DraftForm
from localmoe.core.home import localmoe_home
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ModelFootprint, ProgressCallback
from localmoe.engine.disk_records import load_from_disk
from localmoe.engine.draft_layers import DraftLayers
from localmoe.engine.drafts import DRAFT_BITS, GROUP_SIZE, DraftInfo
from localmoe.experts.host_store import HostStore
from localmoe.experts.record_file import RecordFile
from localmoe.experts.record_store import RecordStore
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.footprint import can_keep_mxfp4, can_pack, coded_form
from localmoe.model.mtp_layer import MtpSkeleton
from localmoe.model.packed_head import saved_bytes
from localmoe.model.random_weights import (
    STORED_DTYPE,
    fill_random,
    random_draft,
    random_packed_draft,
)
from localmoe.model.shapes import ModelShape
from localmoe.model.skeleton import Skeleton, embedding_shape, skeleton_from_config
from localmoe.model.synthetic import SyntheticModel
from localmoe.vision.source import VisionSource


@dataclass(frozen=True, slots=True)
class RandomSource:
    """A model of a real one's shape whose weights are random numbers; it has no file and no words."""

    shape: ModelShape
    synthetic: SyntheticSettings

    @property
    def name(self) -> str:
        """Says what it is."""
        return f"{self.shape.name} (synthetic weights)"

    @property
    def stored_dtype(self) -> torch.dtype:
        """bfloat16, but for experts that stay in MXFP4."""
        return STORED_DTYPE

    def skeleton(self, dtype: torch.dtype) -> Skeleton:
        """Raises UnsupportedModelError: transformers cannot build the shape."""
        return skeleton_from_config(self.shape.config(), dtype, f"the shape {self.shape.name}")

    def has_draft(self) -> bool:
        """It is made in a moment."""
        return True

    def has_wide_matrices(self) -> bool:
        """All have one dtype."""
        return False

    def can_keep_mxfp4(self, skeleton: Skeleton) -> bool:
        """As the real model is published."""
        return can_keep_mxfp4(skeleton, self.stored_dtype)

    def can_pack(self, skeleton: Skeleton) -> bool:
        """Normal weights have few strays."""
        return can_pack(skeleton, self.stored_dtype)

    def coded_form(self, skeleton: Skeleton) -> WeightForm | None:
        """As the real model is published."""
        return coded_form(skeleton, self.stored_dtype)

    def can_pack_head(self, skeleton: Skeleton) -> bool:
        """Likewise."""
        return saved_bytes(skeleton.model, self.stored_dtype) > 0

    def never_pack(self, *, head: bool = False, form: WeightForm = WeightForm.BF12) -> None:
        """Other seeds may."""

    def load_weights(
        self,
        skeleton: Skeleton,
        device: torch.device,
        *,
        ram_experts: int = 0,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> RecordStore:
        """Raises LoadCancelledError: `cancel` was set; and as engine.disk_records.load_from_disk."""
        layouts, count = [experts.layout for experts in skeleton.experts], skeleton.num_experts
        embedding = embedding_shape(skeleton)

        def fill_all(memory: Callable[[int], mmap.mmap] | None = None) -> HostStore:
            store = HostStore(layouts, count, STORED_DTYPE, embedding, memory=memory)
            try:
                fill_random(skeleton, device, store, self.synthetic.seed, progress=progress, cancel=cancel)
            except BaseException:
                store.close()
                raise
            return store

        if not ram_experts:
            return fill_all()
        file = RecordFile.for_one_load(localmoe_home() / "synthetic", layouts, count, STORED_DTYPE)
        return load_from_disk(file, ram_experts, embedding, fill_all, None, progress=progress, cancel=cancel)

    def draft_form(self, folder: Path | None) -> DraftForm:
        """4 bits in groups of 128."""
        return DraftForm(DRAFT_BITS, GROUP_SIZE)

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
        """Random codes, which are not those of the random weights."""
        assert folder is None, "a shape has no draft folder"
        info, seed = DraftInfo(DRAFT_BITS, "synthetic", GROUP_SIZE), self.synthetic.seed
        if packed:
            return info, random_packed_draft(skeleton, device, seed, GROUP_SIZE)
        return info, random_draft(skeleton, device, seed, GROUP_SIZE, fused=fused)

    def has_mtp(self) -> bool:
        """As the real model is published."""
        return self.shape.has_mtp

    def load_mtp(
        self,
        made: MtpSkeleton,
        device: torch.device,
        *,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> RecordStore:
        """Raises as `load_weights`."""
        return self.load_weights(made.skeleton, device, progress=progress, cancel=cancel)

    def simulation(self, footprint: ModelFootprint) -> SyntheticModel | None:
        """Raises ConfigError: the trace to replay cannot be read, or is of a model of another shape."""
        return SyntheticModel(
            self.synthetic, footprint.num_layers, footprint.num_experts, footprint.experts_per_token
        )

    def vision(self) -> VisionSource | None:
        """None: a shape has no pictures."""
        return None

    def encoder(self, vocab_size: int, device: torch.device) -> Encoder:
        """Takes token ids only."""
        return TokenEncoder(vocab_size)

    def end_tokens(self, encoder: Encoder) -> frozenset[int]:
        """None: an answer goes on to its limit."""
        return frozenset()

    @property
    def own_sampling(self) -> None:
        """Nobody recommends anything for random weights."""
