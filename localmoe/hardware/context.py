"""How long a context may be, and how long it is where the user names none. Divides no memory; see plan."""

from __future__ import annotations

from localmoe.core.config import LEAST_CONTEXT, LONGEST_UNASKED, USUAL_CONTEXT
from localmoe.core.errors import ConfigError
from localmoe.core.types import ModelFootprint
from localmoe.hardware.needs import NeedsOptions, device_needs

_SHARE = 24  # of the memory, a 24th may go to what is beyond the usual: some 2 % of an answer's speed


def usual_context(footprint: ModelFootprint) -> int:
    """Tokens, where none are named and no memory is looked at."""
    return min(USUAL_CONTEXT, footprint.max_context)


def check_context(context: int | None, footprint: ModelFootprint) -> None:
    """context: that was asked for, if one was.

    Raises:
        ConfigError: more than the model was made for; or that is next to nothing.
    """
    if footprint.max_context < LEAST_CONTEXT:
        raise ConfigError(
            f"{footprint.name} says that it was made for {footprint.max_context} tokens of context, and "
            f"{LEAST_CONTEXT} are the least: its config.json is damaged, so download the model again."
        )
    if context is not None and context > footprint.max_context:
        raise ConfigError(
            f"{footprint.name} was made for at most {footprint.max_context} tokens of context, "
            f"not {context}: use {footprint.max_context} or fewer."
        )


def unasked_context(
    footprint: ModelFootprint,
    budget_bytes: int,
    options: NeedsOptions,
    *,
    drafting: bool,
    host_bytes: int | None = None,
) -> int:
    """The usual context, doubled for as long as that costs answers next to no speed, or a GPU's memory lies
    idle: thoughts of reasoning models are longer than 4,096 tokens, and with latent, sliding or linear
    attention a context takes little.

    Args:
        budget_bytes: device memory that is divided.
        drafting: whether a draft is wanted; one that fits beside the usual context keeps its place.
        host_bytes: of host RAM that may be taken; None: enough.
    """
    context = usual_context(footprint)
    usual = device_needs(footprint, context=context, **options)
    drafting = drafting and usual.least_bytes(drafting=True) <= budget_bytes
    spare = budget_bytes // _SHARE
    if options.get("whole_passes"):  # of a GPU's own memory nothing else has use for what lies idle
        spare = max(spare, budget_bytes - usual.most_bytes(drafting=drafting))
    allowed = usual.fixed_bytes(drafting=drafting) + spare
    longest = min(LONGEST_UNASKED, footprint.max_context)
    if footprint.trained_context:  # who wants longer texts than that has to ask for what short ones lose
        longest = min(longest, max(context, footprint.trained_context))
    while context < longest:
        longer = min(2 * context, longest)
        needs = device_needs(footprint, context=longer, **options)
        fits = needs.least_bytes(drafting=drafting) <= budget_bytes
        fits &= host_bytes is None or needs.host_bytes <= host_bytes
        if not fits or needs.fixed_bytes(drafting=drafting) > allowed:
            break
        context = longer
    return context
