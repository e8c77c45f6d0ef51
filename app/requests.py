"""What the engine is asked: messages and settings as a request. Knows no file and starts no answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from app.chats import ChatError, ChatMessage
from app.pictures import MAX_PICTURES, is_picture_id
from app.settings import AnswerSettings
from app.unicode_text import whole_unicode
from localmoe.chat.reasoning import split_reasoning
from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.types import Image, Message

MAX_MESSAGE = 1_000_000  # characters
ReadPicture = Callable[[str], bytes]  # by its id


def make_request(
    messages: Sequence[ChatMessage],
    settings: AnswerSettings,
    before: ChatMessage | None = None,
    *,
    read: ReadPicture,
    drafts: bool = True,
    own: SamplingConfig | None = None,
) -> GenerationRequest:
    """The answer to the last of these messages, a question.

    Args:
        before: its answer so far, to be continued.
        read: may raise a LocalMoeError, as for a picture that is not there.
        drafts: whether a draft is loaded; where none is, the chosen draft length waits for one.
        own: how the loaded model's makers recommend to choose tokens, if they do.
    """
    begun = () if before is None else (Message("assistant", before.content),)
    return GenerationRequest(
        messages=(*request_messages(messages, settings.system_prompt, read), *begun),
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling(own),
        draft_length=settings.draft_length if drafts else "auto",
        policy=settings.policy,
        strict=settings.strict,
        draft_only=settings.approximate,
        continue_answer=before is not None,
        thinking=settings.thinking,
    )


def request_messages(
    messages: Sequence[ChatMessage], system_prompt: str, read: ReadPicture
) -> tuple[Message, ...]:
    """What the model is given: the system prompt, the turns that have an answer, and the last question.
    Thoughts are left out of earlier answers, as the templates of reasoning models expect. Pictures come
    before the text of their message. Raises as `read`."""

    def asked(message: ChatMessage) -> Message:
        return Message("user", message.content, images=tuple(Image(read(one)) for one in message.images))

    turns = [Message("system", system_prompt)] if system_prompt.strip() else []
    for index, message in enumerate(messages):
        answer = messages[index + 1] if index + 1 < len(messages) else None
        if message.role == "user" and answer is None:
            turns.append(asked(message))
        elif message.role == "user" and answer is not None and answer.role == "assistant":
            text = split_reasoning(answer.content).answer
            if text:
                turns += [asked(message), Message("assistant", text)]
    return tuple(turns)


def attached_pictures(told: object) -> tuple[str, ...]:
    """The ids of a message's pictures, as the page's script tells them.

    Raises:
        ChatError: one was not attached.
    """
    try:
        found = json.loads(told) if isinstance(told, str) and told else []
    except (ValueError, RecursionError):
        found = None
    return picture_ids(found)


def picture_ids(found: object) -> tuple[str, ...]:
    """These, if they are nothing else. Raises as `attached_pictures`."""
    if not isinstance(found, list) or not all(map(is_picture_id, found)):
        raise ChatError("A picture was not attached: attach it again, or send the message without it.")
    return tuple(found)


def make_question(text: str, images: Sequence[str] = ()) -> ChatMessage:
    """A message of now, with pictures of these ids; raises ChatError when there is nothing, or far too much,
    of it."""
    text = whole_unicode(text).strip()
    if len(images) > MAX_PICTURES:
        raise ChatError(f"The message has {len(images)} pictures: send at most {MAX_PICTURES}.")
    if not text and not images:
        raise ChatError("The message is empty: write something first.")
    if len(text) > MAX_MESSAGE:
        raise ChatError(f"The message has {len(text):,} characters: send at most {MAX_MESSAGE:,}.")
    return ChatMessage("user", text, time.time(), images=tuple(images))
