"""A model's weights, draft and text, of a checkpoint on this machine (engine.model_source.ModelSource). Plans
nothing."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from localmoe.chat.prompt import Encoder, PromptEncoder
from localmoe.core.config import SamplingConfig
from localmoe.core.draft_config import DraftForm, DraftSettings, GptqSettings
from localmoe.core.errors import DraftError
from localmoe.core.remembered import Remembered
from localmoe.core.types import ModelFootprint, ProgressCallback
from localmoe.engine.default_drafts import default_form, default_places
from localmoe.engine.disk_records import load_from_disk
from localmoe.engine.draft_layers import DraftLayers
from localmoe.engine.drafting import DraftBasis, make_draft
from localmoe.engine.drafts import (
    DRAFT_BITS,
    DraftInfo,
    HostExpertSource,
    load_draft,
)
from localmoe.engine.end_tokens import read_end_tokens
from localmoe.engine.own_sampling import read_own_sampling
from localmoe.experts.record_file import RecordFile
from localmoe.experts.record_store import RecordStore
from localmoe.hub.catalogue import LocalModel, resolve_model
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.draft_places import drafts_home
from localmoe.hub.int4_tensors import is_int4
from localmoe.hub.mtp_tensors import has_mtp, mtp_tensors
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.footprint import (
    can_keep_mxfp4,
    can_pack,
    checkpoint_dtype,
    coded_form,
)
from localmoe.model.loader import load_shared, load_weights
from localmoe.model.mtp_layer import MtpSkeleton
from localmoe.model.packed_head import saved_bytes
from localmoe.model.skeleton import Skeleton, build_skeleton, embedding_shape
from localmoe.model.synthetic import SyntheticModel
from localmoe.model.weight_reader import stored_dtype
from localmoe.quant.base_check import DraftBase
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.mxfp4 import parameter_of
from localmoe.vision.source import VisionSource, find_vision

_UNPACKABLE = Remembered(
    "unpackable.json", "localmoe unpackable experts 1", "models", "what cannot be packed"
)


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A model folder."""

    model: LocalModel
    checkpoint: Checkpoint
    draft_bits: int = DRAFT_BITS  # of the draft in the default place
    own_sampling: SamplingConfig | None = None
    named_ends: frozenset[int] = frozenset()  # tokens that end an answer, but for the tokenizer's

    @classmethod
    def open(cls, model: str, draft_bits: int = DRAFT_BITS) -> CheckpointSource:
        """Resolve a folder, repo id or "demo" and check its headers.

        Raises:
            LocalMoeError: it is not there, or damaged.
        """
        found = resolve_model(model)
        checkpoint = Checkpoint.open(found.folder)
        own_sampling, ends = read_own_sampling(found.folder), read_end_tokens(found.folder)
        checkpoint.fingerprint()  # known from now on, also when a pull puts other weights in their place
        return cls(found, checkpoint, draft_bits, own_sampling, ends)

    @property
    def name(self) -> str:
        """As the user may name it."""
        return self.model.name

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that most of the checkpoint's bytes have."""
        return checkpoint_dtype(self.checkpoint)

    def skeleton(self, dtype: torch.dtype) -> Skeleton:
        """Raises UnsupportedModelError, as `build_skeleton`."""
        return build_skeleton(self.checkpoint, dtype)

    def can_keep_mxfp4(self, skeleton: Skeleton) -> bool:
        """If all of them are, in shapes that records can have."""
        stored = sum(bool(parameter_of(name)) for name in self.checkpoint.tensors)
        return can_keep_mxfp4(skeleton, self.stored_dtype) and stored == 2 * len(skeleton.experts)

    def can_pack(self, skeleton: Skeleton) -> bool:
        """By shapes, and what an earlier load has found."""
        return can_pack(skeleton, self.stored_dtype) and self._identity not in _UNPACKABLE.read()

    def coded_form(self, skeleton: Skeleton) -> WeightForm | None:
        """Likewise, and if any expert is in codes: fused ones may have been left in 16 bits."""
        form = coded_form(skeleton, self.stored_dtype)
        if form is None or f"{self._identity} {form.value}" in _UNPACKABLE.read():
            return None
        experts = [header for name, header in self.checkpoint.tensors.items() if ".experts." in name]
        coded = any(header.scales is not None or header.integers is not None for header in experts)
        return form if coded or not experts else None

    def can_pack_head(self, skeleton: Skeleton) -> bool:
        """Likewise."""
        saved = saved_bytes(skeleton.model, self.stored_dtype)
        return saved > 0 and self._head_identity not in _UNPACKABLE.read()

    def never_pack(self, *, head: bool = False, form: WeightForm = WeightForm.BF12) -> None:
        """In localmoe's home."""
        experts = self._identity if form is WeightForm.BF12 else f"{self._identity} {form.value}"
        _UNPACKABLE.keep(self._head_identity if head else experts, self.name)

    @property
    def _head_identity(self) -> str:
        return f"{self._identity} head"

    @property
    def _identity(self) -> str:
        """Of these files."""
        headers = self.checkpoint.tensors.values()
        newest = max((header.version.modified_ns for header in headers), default=0)
        return f"{self.checkpoint.folder} {self.checkpoint.total_bytes} {newest}"

    def has_wide_matrices(self) -> bool:
        """By their headers. Beside INT4 float16 is none: it is what published bfloat16 was made into."""
        held = {self.stored_dtype, torch.float16 if is_int4(self.checkpoint.config) else self.stored_dtype}
        return any(
            len(header.shape) > 1 and header.dtype != "U8" and stored_dtype(header) not in held
            for header in self.checkpoint.tensors.values()
        )

    def load_weights(
        self,
        skeleton: Skeleton,
        device: torch.device,
        *,
        ram_experts: int = 0,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> RecordStore:
        """Raises as model.loader.load_weights, and engine.disk_records.load_from_disk."""
        fill_all = partial(
            load_weights, skeleton, self.checkpoint, device=device, progress=progress, cancel=cancel
        )
        fill_shared = partial(
            load_shared, skeleton, self.checkpoint, device=device, progress=progress, cancel=cancel
        )
        if not ram_experts:
            return fill_all(pin=device.type == "cuda")
        fingerprint = self.checkpoint.fingerprint()
        layouts = [experts.layout for experts in skeleton.experts]
        home = drafts_home(self.name, fingerprint)
        return load_from_disk(
            RecordFile.in_folder(home, layouts, skeleton.num_experts, self.stored_dtype, fingerprint),
            ram_experts,
            embedding_shape(skeleton),
            lambda memory: fill_all(memory=memory),
            lambda store: fill_shared(store=store),
            progress=progress,
            cancel=cancel,
        )

    def draft_base(self, skeleton: Skeleton, store: RecordStore) -> DraftBase:
        """What a draft of this model is held against."""
        experts = HostExpertSource(skeleton, store)
        checkpoint = self.checkpoint
        return DraftBase(self.name, checkpoint.fingerprint(), checkpoint.revision, checkpoint.config, experts)

    def has_draft(self) -> bool:
        """Whether one was made, or comes with the model."""
        return bool(self.model.drafts)

    def draft_form(self, folder: Path | None) -> DraftForm:
        """From headers: that of the named draft, or of the best whole one in the default place.

        Raises:
            DraftError: the named one is damaged.
        """
        if folder is not None:
            return DraftCheckpoint.open(folder).form
        return default_form(self.model, self.checkpoint, self.draft_bits)

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
        """The draft that the user named, or the one in the default place, which is built (round-to-nearest)
        where there is none or where it is damaged or of other weights.

        Raises:
            DraftError: the named one is damaged or of another model; or there is none, and the model's files
                are other ones by now. LoadCancelledError: `cancel` was set.
        """
        base = self.draft_base(skeleton, store)
        load = partial(
            load_draft, skeleton=skeleton, device=device, base=base,
            packed=packed, fused=fused, progress=progress, cancel=cancel,
        )  # fmt: skip
        if folder is not None:
            return load(folder)
        for place in default_places(self.model, base.fingerprint, self.draft_form(None)):
            with suppress(DraftError):
                return load(place)
        if not may_build:
            raise DraftError(
                "There is no draft of these weights: load the model with a draft length to build one."
            )
        basis = DraftBasis(self.model, self.checkpoint, skeleton, store)
        settings = DraftSettings("rtn", GptqSettings(self.draft_bits))
        return load(make_draft(basis, None, settings, progress=progress, cancel=cancel))

    def has_mtp(self) -> bool:
        """By their names."""
        return has_mtp(self.checkpoint.tensors)

    def load_mtp(
        self,
        made: MtpSkeleton,
        device: torch.device,
        *,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> RecordStore:
        """Raises as `load_weights`."""
        tensors = mtp_tensors(self.checkpoint, made.paths)
        assert tensors is not None, "has_mtp comes first"
        return load_weights(made.skeleton, tensors, device=device, progress=progress, cancel=cancel)

    def simulation(self, footprint: ModelFootprint) -> SyntheticModel | None:
        """None: the model routes itself."""
        return None

    def vision(self) -> VisionSource | None:
        """By its config and files."""
        found = find_vision(self.checkpoint)
        return found if isinstance(found, VisionSource) else None

    def encoder(self, vocab_size: int, device: torch.device) -> Encoder:
        """Raises CheckpointError: there is no readable tokenizer."""
        found = find_vision(self.checkpoint)
        images = found.reader_or_refusal(device) if isinstance(found, VisionSource) else found
        return PromptEncoder(self.model.folder, vocab_size, images=images)

    def end_tokens(self, encoder: Encoder) -> frozenset[int]:
        """What generation config, config and tokenizer say."""
        own = getattr(encoder.tokenizer, "eos_token_id", None)
        return self.named_ends | {own} if isinstance(own, int) else self.named_ends
