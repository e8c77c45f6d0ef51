"""How much of the model's context a chat has used, and what that leaves for the next message, in words.
Counts no token itself: the figures are those of the last answer, and of what is being written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape

from app.chats import Chat
from app.texts import ENGLISH, Texts
from app.typed import NOTHING, Typed
from localmoe.chat.reasoning import split_reasoning

_NO_ROOM = 16  # tokens: what the template puts around a question and an answer


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Tokens. `about`: the last answer's thoughts are not given back to the model, and how many of its
    tokens they were is known by their share of the characters alone.

    Attributes:
        used: by the chat as it is.
        typed: the message that is being written, without what a template puts around it.
    """

    used: int
    context: int
    about: bool = False
    typed: Typed = NOTHING

    @property
    def left(self) -> int:
        """For the next message and its answer; for the answer alone of a message that is being written."""
        return max(0, self.context - self.used - self.typed.tokens)

    @property
    def full(self) -> bool:
        """The next message would be refused."""
        return self.left <= _NO_ROOM


def context_use(chat: Chat | None, context: int, typed: Typed = NOTHING) -> ContextUse | None:
    """After the last answer of the shown branch that was measured; None: there is none, and nothing is being
    written."""
    for message in reversed(chat.messages if chat is not None else ()):
        prompt, new = message.stats.get("prompt_tokens"), message.stats.get("new_tokens")
        if isinstance(prompt, int) and isinstance(new, int):
            split = split_reasoning(message.content)
            about = bool(split.thoughts)
            if about:
                new = round(new * len(split.answer) / len(message.content))
            return ContextUse(prompt + new, context, about, typed)
    return ContextUse(0, context, False, typed) if typed.tokens else None


def has_room_to_continue(chat: Chat, context: int) -> bool:
    """Whether the last answer of the shown branch did not end because the context was full."""
    stats = chat.messages[-1].stats if chat.messages else {}
    used = (stats.get("prompt_tokens") or 0) + (stats.get("new_tokens") or 0)
    return bool(used + 1 < context)


def meter_html(use: ContextUse | None, max_new_tokens: int, t: Texts = ENGLISH) -> str:
    """The line under the box to write in; a warning before the limit is reached."""
    if use is None:
        return ""
    nearly = use.left < min(max_new_tokens, use.context // 4) or use.left < use.context // 10
    text = _full(use, t) or (_typing(use, t) if use.typed.tokens else _resting(use, nearly, t))
    state = " full" if use.full else " nearly" if nearly else ""
    role = ' role="status"' if use.full or (nearly and not use.typed.tokens) else ""  # not with every key
    share = min(100.0, 100 * (use.used + use.typed.tokens) / use.context)
    bar = f'<span class="lm-meter-bar" aria-hidden="true"><i style="width:{share:.1f}%"></i></span>'
    return f'<p class="lm-meter{state}"{role}>{bar}<span>{escape(text)}</span></p>'


def _full(use: ContextUse, t: Texts) -> str:
    """Why a message would be refused; "" if it would not."""
    context, before = f"{use.context:,}", replace(use, typed=NOTHING)
    if before.full:
        return t(
            "The context of {context} tokens is full: another message would be refused. Begin a new chat, "
            "edit an earlier message, or load the model with a longer context under Settings.",
            context=context,
        )
    if use.full:
        return t(
            "Your message is too long: {left} of {context} tokens are left for it and its answer. Shorten "
            "it, begin a new chat, or load the model with a longer context under Settings.",
            left=_about(before.left, before, t), context=context,
        )  # fmt: skip
    return ""


def _typing(use: ContextUse, t: Texts) -> str:
    return t(
        "{used} of {context} tokens used, with {typed} of your message; {left} are left for its answer.",
        used=_about(use.context - use.left, use, t), context=f"{use.context:,}",
        typed=f"{use.typed.tokens:,}", left=_about(use.left, use, t),
    )  # fmt: skip


def _resting(use: ContextUse, nearly: bool, t: Texts) -> str:
    used, left, context = _about(use.used, use, t), _about(use.left, use, t), f"{use.context:,}"
    if nearly:
        return t(
            "Nearly full: {left} of {context} tokens are left for your next message and its answer, which "
            "would be cut there. A new chat or a longer context under Settings gives more room.",
            left=left, context=context,
        )  # fmt: skip
    return t(
        "{used} of {context} tokens used; {left} are left for your next message and its answer.",
        used=used, context=context, left=left,
    )  # fmt: skip


def _about(count: int, use: ContextUse, t: Texts) -> str:
    text = f"{count:,}"
    return t("about {count}", count=text) if use.about or use.typed.about else text
