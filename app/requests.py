"""What the engine is asked: messages and settings as a request. Knows no chat file and starts no answer."""

from __future__ import annotations

from collections.abc import Sequence

from app.chats import ChatError, ChatMessage
from app.settings import AnswerSettings
from app.unicode_text import whole_unicode
from localmoe.chat.reasoning import split_reasoning
from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.types import Message

MAX_MESSAGE = 1_000_000  # characters


def make_request(
    messages: Sequence[ChatMessage],
    settings: AnswerSettings,
    before: ChatMessage | None = None,
    *,
    drafts: bool = True,
    own: SamplingConfig | None = None,
) -> GenerationRequest:
    """The answer to the last of these messages, a question.

    Args:
        before: its answer so far, to be continued.
        drafts: whether a draft is loaded; where none is, the chosen draft length waits for one.
        own: how the loaded model's makers recommend to choose tokens, if they do.
    """
    begun = () if before is None else (Message("assistant", before.content),)
    return GenerationRequest(
        messages=(*request_messages(messages, settings.system_prompt), *begun),
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling(own),
        draft_length=settings.draft_length if drafts else "auto",
        policy=settings.policy,
        strict=settings.strict,
        draft_only=settings.approximate,
        continue_answer=before is not None,
        thinking=settings.thinking,
    )


def request_messages(messages: Sequence[ChatMessage], system_prompt: str) -> tuple[Message, ...]:
    """What the model is given: the system prompt, the turns that have an answer, and the last question.
    Thoughts are left out of earlier answers, as the templates of reasoning models expect."""
    turns = [Message("system", system_prompt)] if system_prompt.strip() else []
    for index, message in enumerate(messages):
        answer = messages[index + 1] if index + 1 < len(messages) else None
        if message.role == "user" and answer is None:
            turns.append(Message("user", message.content))
        elif message.role == "user" and answer is not None and answer.role == "assistant":
            text = split_reasoning(answer.content).answer
            if text:
                turns += [Message("user", message.content), Message("assistant", text)]
    return tuple(turns)


def check_message(text: str) -> str:
    """The text to send; raises ChatError when there is nothing, or far too much, of it."""
    text = whole_unicode(text).strip()
    if not text:
        raise ChatError("The message is empty: write something first.")
    if len(text) > MAX_MESSAGE:
        raise ChatError(f"The message has {len(text):,} characters: send at most {MAX_MESSAGE:,}.")
    return text
