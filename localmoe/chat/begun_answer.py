"""An answer that was begun, as it goes on behind the template's opening of one. Renders no template."""

from __future__ import annotations

from typing import Any

from localmoe.chat.answer_schema import knows_thoughts
from localmoe.chat.harmony import as_messages, harmony_marks
from localmoe.chat.reasoning import CLOSE, OPEN, resumed
from localmoe.chat.thought_marks import thought_marks
from localmoe.core.types import Message


def begun_text(tokenizer: Any, opening: str, begun: Message) -> str:
    """The opening, and what there is of the answer: behind its thoughts, where the model has any."""
    if harmony_marks(tokenizer):
        return opening + as_messages(_tagged(begun, "\n", "\n"))
    marks = thought_marks(tokenizer)
    if not knows_thoughts(tokenizer):
        answer = begun.content
    elif marks is not None:  # models with such marks write nothing around them
        answer = _tagged(begun, "", "")
    else:
        answer = _tagged(begun, "" if opening.rstrip().endswith(OPEN) else "\n", "\n")
    return resumed(opening, answer, marks)


def _tagged(begun: Message, before: str, behind: str) -> str:
    """before, behind: white space around the thoughts, twice as much of the latter before the answer."""
    if not begun.thoughts:
        return begun.content
    return f"{OPEN}{before}{begun.thoughts}{behind}{CLOSE}{2 * behind}{begun.content}"
