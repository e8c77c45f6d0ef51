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
    used = stats.get("prompt_tokens", 0) + stats.get("new_tokens", 0)
    return bool(used + 1 < context)


def meter_html(use: ContextUse | None, max_new_tokens: int, t: Texts = ENGLISH) -> str:
    """The line under the box to write in; a warning before the limit is reached."""
    if use is None:
        return ""
    used, context, left = f"{use.used:,}", f"{use.context:,}", f"{use.left:,}"
    name, role, before = "lm-meter", "", replace(use, typed=NOTHING)
    if use.full and not before.full:
        text = t(
            "Your message is too long: {left} of {context} tokens are left for it and its answer. Shorten "
            "it, begin a new chat, or load the model with a longer context under Settings.",
            left=_about(f"{before.left:,}", before, t), context=context,
        )  # fmt: skip
        name, role = "lm-meter full", ' role="status"'
    elif use.full:
        text = t(
            "The context of {context} tokens is full: another message would be refused. Begin a new chat, "
            "edit an earlier message, or load the model with a longer context under Settings.",
            context=context,
        )
        name, role = "lm-meter full", ' role="status"'
    elif use.typed.tokens:
        text = t(
            "{used} of {context} tokens used, with {typed} of your message; {left} are left for its answer.",
            used=_about(f"{use.context - use.left:,}", use, t), context=context,
            typed=f"{use.typed.tokens:,}",
            left=_about(left, use, t),
        )  # fmt: skip
        if _nearly_full(use, max_new_tokens):
            name = "lm-meter nearly"
    elif _nearly_full(use, max_new_tokens):
        text = t(
            "Nearly full: {left} of {context} tokens are left for your next message and its answer, which "
            "would be cut there. A new chat or a longer context under Settings gives more room.",
            left=_about(left, use, t), context=context,
        )  # fmt: skip
        name, role = "lm-meter nearly", ' role="status"'
    else:
        text = t(
            "{used} of {context} tokens used; {left} are left for your next message and its answer.",
            used=_about(used, use, t), context=context, left=_about(left, use, t),
        )  # fmt: skip
    share = min(100.0, 100 * (use.used + use.typed.tokens) / use.context)
    bar = f'<span class="lm-meter-bar" aria-hidden="true"><i style="width:{share:.1f}%"></i></span>'
    return f'<p class="{name}"{role}>{bar}<span>{escape(text)}</span></p>'


def _nearly_full(use: ContextUse, max_new_tokens: int) -> bool:
    return use.left < min(max_new_tokens, use.context // 4) or use.left < use.context // 10


def _about(count: str, use: ContextUse, t: Texts) -> str:
    return t("about {count}", count=count) if use.about or use.typed.about else count
