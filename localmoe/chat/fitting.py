"""Whether token ids make a prompt: known ones, some, and with room left for an answer. Tokenises nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

from localmoe.core.errors import ConfigError, ContextLengthError

_ROOM = 64  # tokens of an answer, in the context that a refusal advises


def known(ids: Sequence[int], vocab_size: int) -> Sequence[int]:
    """Ids that a user gave, if all are in the vocabulary."""
    if not all(_is_whole(token) and 0 <= token < vocab_size for token in ids):
        raise ConfigError(
            f"A prompt token id lies outside of 0 to {vocab_size - 1}, this model's vocabulary."
        )
    return ids


def _is_whole(token: object) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def fitting(
    ids: Sequence[int], context: int, max_context: Callable[[], int | None] = lambda: None
) -> list[int]:
    """The ids, if they make a prompt. max_context: the longest that the model can be loaded with, asked for
    only where it is needed; None: it is not known."""
    if not ids:
        raise ConfigError("The prompt is empty: write something.")
    if len(ids) >= context:
        raise too_long(len(ids), context, max_context, counted=True)
    return list(ids)


def too_long(
    num_tokens: int, context: int, max_context: Callable[[], int | None], *, counted: bool
) -> ContextLengthError:
    """counted: the prompt has so many tokens; else its beginning alone has them."""
    longest = max_context() or 0
    remedy = "shorten the prompt"
    if num_tokens < longest:
        needed = min(num_tokens + _ROOM, longest) if counted else longest
        remedy += f" or load the model with a context of {'at least' if counted else 'up to'} {needed}"
    elif longest:
        remedy += f", as the model was made for at most {longest} tokens"
    number = f"{'' if counted else 'more than '}{num_tokens}"
    return ContextLengthError(
        f"The prompt has {number} tokens, but the context holds {context} and the answer needs room too: "
        f"{remedy}.", num_tokens=num_tokens, context=context,
    )  # fmt: skip
