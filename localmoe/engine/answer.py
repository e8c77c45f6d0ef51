"""An answer's steps as events for whoever reads it: text, tokens, statistics. Runs no step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from localmoe.chat.reasoning import opens_reasoning
from localmoe.chat.session import Session
from localmoe.chat.text_stream import text_stream
from localmoe.chat.tool_formats import FORCED, find_format
from localmoe.core.config import GenerationRequest
from localmoe.core.stream import StreamEvent
from localmoe.engine.log_lines import log_answer
from localmoe.engine.meter import Meter
from localmoe.speculative.loop import StepResult


def write_events(
    steps: Iterable[StepResult],
    prompt: Sequence[int],
    session: Session | None,
    tokenizer: Any,
    meter: Meter,
    request: GenerationRequest,
) -> Iterator[StreamEvent]:
    """One event a step; the first carries the prompt's tokens. What was emitted is the session's too, if its
    keys and values are the target's: the next turn must build on no others. request: what is answered, of
    which the tools count here."""
    calls = FORCED if request.must_call else find_format(tokenizer) if request.tools else ""
    told, text = tuple(prompt), text_stream(tokenizer, prompt, calls)
    thinks, reason = opens_reasoning(tokenizer, prompt), "its reader went away"
    try:
        for step in steps:
            meter.update()
            if session is not None and not request.draft_only:
                session.extend(step.tokens)
            reason = step.finish_reason or reason
            pieces = [text.add([token]) for token in step.tokens]
            rest = text.finish() if step.finish_reason else ""
            if rest:
                pieces = [*pieces[:-1], "".join(pieces[-1:]) + rest]
            yield StreamEvent(
                text="".join(pieces),
                token_ids=tuple(step.tokens),
                drafted=step.from_draft,
                finish_reason=step.finish_reason,
                stats=meter.counters.freeze(),
                prompt_token_ids=told,
                pieces=tuple(pieces),
                opens_reasoning=thinks,
                tool_format=calls,
            )
            told, thinks, calls = (), False, ""
    except Exception as error:
        reason = type(error).__name__
        raise
    finally:
        meter.counters.ended = True
        log_answer(reason, meter.counters.freeze())
