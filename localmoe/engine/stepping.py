"""How an answer's steps are taken: by which stepper, and how long a step is. Takes none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from localmoe.core.config import MAX_DRAFT_LENGTH, DraftLength, EngineConfig, GenerationRequest
from localmoe.core.errors import DraftError
from localmoe.core.plan_types import MemoryPlan
from localmoe.engine.draft_models import make_model_drafter
from localmoe.engine.loading import EngineParts
from localmoe.engine.settings import choose_draft_length
from localmoe.model.draft_model import DraftModel
from localmoe.model.runner import ModelRunner
from localmoe.speculative.draft_steppers import DeviceDraftStepper, DraftStepper
from localmoe.speculative.drafters import Drafter, SelfDrafter
from localmoe.speculative.forced_tokens import ForcedOrFound
from localmoe.speculative.found_instead import FoundInstead
from localmoe.speculative.governor import FixedGovernor, Governor
from localmoe.speculative.grammar import Grammar
from localmoe.speculative.grammar_stepper import GrammarStepper
from localmoe.speculative.prompt_lookup import PromptLookupDrafter
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import DeviceStepper, PassStepper, Stepper

LOOKUP = "prompt-lookup"  # the drafter
_DRAFT_RUN = 7  # tokens that the draft alone writes between two looks of the host, and one


def choose_governor(
    parts: EngineParts, request: GenerationRequest, config: EngineConfig, plan: MemoryPlan, auto: Governor
) -> Governor:
    """Who picks the draft length of each step. auto: for where it is left to the engine.

    Raises:
        DraftError: a draft is needed, and none is loaded or can be.
    """
    footprint, has_draft = parts.prepared.footprint, parts.passes.draft is not None
    if request.draft_only:
        if not has_draft:
            why = f"{parts.other.name} drafts" if parts.other is not None else plan.drafting_reason
            raise DraftError(
                f"No low-bit draft is loaded ({why}), so it cannot answer alone: turn approximate "
                "(draft-only) answers off, or load the model with its low-bit draft."
            )
        return FixedGovernor(0 if isinstance(parts.runner, ModelRunner) else _DRAFT_RUN)
    wanted = _wanted_length(request, config)
    has_draft = has_draft or parts.other is not None
    if looks_up(parts, config, request):
        has_draft = has_draft or parts.drafter == LOOKUP or wanted == "auto"
    length = choose_draft_length(wanted, plan, footprint, has_draft=has_draft)
    return auto if length == "auto" else FixedGovernor(length)


def _wanted_length(request: GenerationRequest, config: EngineConfig) -> DraftLength:
    return config.draft_length if request.draft_length is None else request.draft_length


def looks_up(parts: EngineParts, config: EngineConfig, request: GenerationRequest | None = None) -> bool:
    """Whether tokens are looked up in the text: where that was asked for, and where a model that may draft
    has no draft at hand and its answers are the same whatever is drafted, since looking up costs nothing.
    request: may go without the latter."""
    if not parts.prepared.footprint.can_rollback:
        return False
    if parts.drafter == LOOKUP:
        return True
    without = parts.passes.draft is None and parts.other is None and config.draft_length != 0
    without = without and (request is None or request.switches.look_up)
    simulated = parts.passes.synthetic is not None  # what is written then repeats nothing
    return without and not simulated and parts.row_padding is not None


def _looks_up_instead(parts: EngineParts, request: GenerationRequest, config: EngineConfig) -> bool:
    """Whether what was looked up may take the place of a draft, the model's own or another model's: as
    `looks_up`, where there is one and its length is left to the engine."""
    has_draft = parts.other is not None or (parts.passes.draft is not None and parts.drafter == "self")
    asked_for = _wanted_length(request, config) == "auto" and request.switches.look_up
    if not has_draft or not asked_for or request.draft_only:
        return False
    simulated = parts.passes.synthetic is not None
    return parts.prepared.footprint.can_rollback and not simulated and parts.row_padding is not None


def make_stepper(
    parts: EngineParts,
    request: GenerationRequest,
    config: EngineConfig,
    governor: Governor,
    sampler: TokenSampler,
    end_tokens: frozenset[int],
    stop: threading.Event | None,
    prompt: Sequence[int],
) -> Stepper:
    """Whole steps on the GPU where no token has to be drawn by the host before the next step. A grammar looks
    at tokens once they are there; recurrent state goes back behind them only while no other pass has run."""
    runner, whole_window = parts.runner, request.switches.whole_window
    grammar = sampler.grammar
    goes_on = grammar.free if grammar is not None and parts.prepared.footprint.state_bytes else None
    drafts = _wanted_length(request, config) != 0 and not request.draft_only
    synthetic = parts.passes.synthetic
    lookup: PromptLookupDrafter | None = None
    instead: FoundInstead | None = None
    if drafts and looks_up(parts, config, request):
        lookup = _lookup(end_tokens, grammar)
    elif _looks_up_instead(parts, request, config):
        longest = min(MAX_DRAFT_LENGTH, parts.passes.rows.max_rows - 1)
        instead = FoundInstead(_lookup(end_tokens, grammar), governor, longest)
    simulated = lookup is not None and synthetic is not None and synthetic.simulates_acceptance
    by_host = simulated or (drafts and parts.other is not None and isinstance(parts.other.model, DraftModel))
    if not isinstance(runner, ModelRunner) and not by_host:
        from localmoe.model.device_draft_steps import DeviceDraftSteps
        from localmoe.model.device_steps import DeviceSteps

        if request.draft_only:
            return DeviceDraftStepper(DeviceDraftSteps(runner, sampler.config, sampler.seed))

        def on_device() -> Stepper:
            steps = DeviceSteps(
                runner, sampler.config, sampler.seed, whole_window=whole_window, goes_on=goes_on
            )
            return DeviceStepper(steps, end_tokens, lookup, instead)

        return on_device() if grammar is None else GrammarStepper(on_device, runner, sampler, grammar)
    if request.draft_only:
        return DraftStepper(runner, sampler)
    drafter: Drafter | None = None
    if parts.other is not None:
        drafter = make_model_drafter(parts.other, runner, parts.prepared.footprint, end_tokens, prompt)
    elif lookup is not None:
        drafter = lookup
    elif parts.passes.draft is not None and isinstance(runner, ModelRunner):
        drafter = SelfDrafter(runner, end_tokens, whole_window=whole_window)
    return PassStepper(runner, drafter, sampler, stop, instead)


def _lookup(end_tokens: frozenset[int], grammar: Grammar | None) -> PromptLookupDrafter:
    return PromptLookupDrafter(end_tokens) if grammar is None else ForcedOrFound(end_tokens, grammar)
