"""A model that drafts in the place of the target's own low-bit experts: found, held against the target's
tokenizer, counted in the plan, loaded. Drafts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localmoe.chat.prompt import PromptEncoder
from localmoe.core.errors import ConfigError, DraftError
from localmoe.core.types import ModelFootprint
from localmoe.engine.settings import ComputeSettings
from localmoe.engine.sources import CheckpointSource, ModelSource
from localmoe.hub.catalogue import resolve_model
from localmoe.model.cross_gates import CrossGates, why_no_routing
from localmoe.model.draft_model import DraftModel, DraftModelShape
from localmoe.model.foretold import Foretold, LayerwiseForetold, TokenwiseForetold
from localmoe.model.next_gate import find_gates
from localmoe.model.runner import ModelRunner
from localmoe.model.skeleton import Skeleton
from localmoe.speculative.model_drafter import ModelDrafter

if TYPE_CHECKING:  # needs Triton
    from localmoe.model.device_runner import DeviceRunner


@dataclass(frozen=True, slots=True)
class OtherDraft:
    """A loaded draft model. gates: tell the target's routing from it; why_none: why nothing does."""

    model: DraftModel
    gates: CrossGates | None
    why_none: str

    def __str__(self) -> str:
        """For people."""
        told = f"; foretells no experts, as {self.why_none}" if self.why_none else ""
        return f"the model {self.model.shape.name}{told}"


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
    footprint: ModelFootprint, shape: DraftModelShape, compute: ComputeSettings
) -> ModelFootprint:
    """The footprint of the target with this draft model beside it."""
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
    gates = find_gates(skeleton)
    reason = why_no_routing(model, skeleton, gates)
    return OtherDraft(model, None if reason else CrossGates(model, skeleton, gates), reason)


def make_model_drafter(
    draft: OtherDraft,
    runner: ModelRunner | DeviceRunner,
    footprint: ModelFootprint,
    end_tokens: frozenset[int],
) -> ModelDrafter:
    """The drafter of one answer."""
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
