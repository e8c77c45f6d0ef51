"""A model that drafts in the place of the target's own low-bit experts: found, held against the target's
tokenizer, counted in the plan, loaded. Drafts nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from localmoe.chat.prompt import PromptEncoder
from localmoe.core.errors import ConfigError, DraftError
from localmoe.core.types import ModelFootprint, ProgressCallback
from localmoe.engine.model_source import ModelSource
from localmoe.engine.mtp_drafts import MtpShape, follow_by_layers, load_mtp, mtp_sizes, with_mtp
from localmoe.engine.settings import ComputeSettings
from localmoe.engine.sources import CheckpointSource
from localmoe.hub.catalogue import resolve_model
from localmoe.model.cross_gates import CrossGates, why_no_routing
from localmoe.model.draft_model import DraftModel, DraftModelShape
from localmoe.model.final_hidden import FinalHidden
from localmoe.model.foretold import Foretold, LayerwiseForetold, TokenwiseForetold
from localmoe.model.mtp_draft import MtpDraft
from localmoe.model.mtp_layer import MtpLayer
from localmoe.model.next_gate import find_gates
from localmoe.model.runner import ModelRunner
from localmoe.model.skeleton import Skeleton
from localmoe.speculative.model_drafter import ModelDrafter

if TYPE_CHECKING:
    from localmoe.engine.planning import PreparedModel
    from localmoe.model.device_mtp import DeviceMtp  # these need Triton
    from localmoe.model.device_runner import DeviceRunner


DraftShape: TypeAlias = DraftModelShape | MtpShape


@dataclass(frozen=True, slots=True)
class OtherDraft:
    """A loaded draft model, or the model's own MTP layer. gates: tell the target's routing from it; why_none:
    why nothing does."""

    model: DraftModel | MtpDraft | DeviceMtp
    gates: CrossGates | None
    why_none: str

    def __str__(self) -> str:
        """For people."""
        told = f"; foretells no experts, as {self.why_none}" if self.why_none else ""
        return f"{self.name}{told}" if isinstance(self.model, DraftModel) else f"{self.name}, in INT4{told}"

    @property
    def name(self) -> str:
        """The same without what it does."""
        return f"the model {self.model.shape.name}" if isinstance(self.model, DraftModel) else "its MTP layer"


def read_draft_model(name: str, source: ModelSource) -> DraftModelShape:
    """Find the model and see whether it can draft for `source`.

    Raises:
        ConfigError: the target is made of random weights.
        DraftError: it has another tokenizer, or keeps recurrent state.
        LocalMoeError: it is not on this machine, or damaged.
    """
    if not isinstance(source, CheckpointSource):
        raise ConfigError("A shape has no tokenizer to share with a draft model: leave the draft model out.")
    found = resolve_model(name)
    shape = DraftModelShape.read(found.name, found.folder)
    folders = (source.model.folder, found.folder)
    ours, theirs = (PromptEncoder(folder).tokenizer.get_vocab() for folder in folders)
    differing = sum(theirs.get(word) != token for word, token in ours.items())
    if differing:
        raise DraftError(
            f"{found.name} cannot draft for {source.name}: {differing:,} of "
            f"{len(ours):,} tokens mean something else to it. Choose a draft model with the same tokenizer."
        )
    return shape


def with_draft_model(
    footprint: ModelFootprint, shape: DraftShape, compute: ComputeSettings
) -> ModelFootprint:
    """The footprint of the target with this draft model beside it."""
    if isinstance(shape, MtpShape):
        return with_mtp(footprint, mtp_sizes(shape.made), compute)
    size = compute.dtype.itemsize
    return replace(
        footprint,
        draft_model_bytes=shape.num_params * size + shape.buffer_bytes,
        draft_model_kv_bytes_per_token=shape.kv_elements_per_token * size,
    )


def load_draft_model(
    shape: DraftModelShape, skeleton: Skeleton, compute: ComputeSettings, context: int
) -> OtherDraft:
    """Read its weights, and connect the target's gates where they fit.

    Raises:
        CheckpointError: weights are missing.
    """
    model = DraftModel.load(shape, compute.device, compute.dtype, context)
    gates = find_gates(skeleton, compute.dtype)
    reason = why_no_routing(model, skeleton, gates)
    return OtherDraft(model, None if reason else CrossGates(model, skeleton, gates), reason)


def load_own_layer(
    prepared: PreparedModel, *, progress: ProgressCallback | None, cancel: threading.Event | None
) -> MtpLayer | None:
    """The model's own MTP layer, where that is to draft.

    Raises:
        LocalMoeError: as `load_mtp`.
    """
    shape = prepared.draft_model
    if not prepared.plan.drafting or not isinstance(shape, MtpShape):
        return None
    return load_mtp(shape, prepared.source, prepared.compute, progress=progress, cancel=cancel)


def own_draft(
    prepared: PreparedModel, layer: MtpLayer, runner: ModelRunner | DeviceRunner
) -> OtherDraft | None:
    """The loaded layer as what drafts for a model that `runner` runs; None if its passes go on without.

    Raises:
        UnsupportedModelError: the architecture does not let its experts be replaced.
    """
    model: MtpDraft | DeviceMtp | None
    if isinstance(runner, ModelRunner):
        assert isinstance(prepared.draft_model, MtpShape), "it was loaded"
        skeleton = prepared.skeleton
        context = prepared.plan.context
        model = follow_by_layers(prepared.draft_model, layer, skeleton, prepared.linears, context)
        runner.listen(model, FinalHidden(skeleton.model))
    else:
        model = runner.passes.mtp
    return None if model is None else OtherDraft(model, None, "it has one layer of its own")


def make_model_drafter(
    draft: OtherDraft,
    runner: ModelRunner | DeviceRunner,
    footprint: ModelFootprint,
    end_tokens: frozenset[int],
    prompt: Sequence[int],
) -> ModelDrafter:
    """The drafter of one answer to a prompt."""
    assert isinstance(draft.model, DraftModel | MtpDraft), "whole steps draft by themselves"
    draft.model.expect(prompt)
    foretold: Foretold
    if isinstance(runner, ModelRunner):
        foretold = LayerwiseForetold(runner.passes)
    else:
        passes = runner.passes
        foretold = TokenwiseForetold(
            passes, passes.memory, footprint.experts_per_token, footprint.num_experts
        )
    return ModelDrafter(
        draft.model, draft.gates, foretold, footprint.vocab_size, end_tokens, lambda: runner.passes.timeline
    )
