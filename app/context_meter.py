"""How much of the model's context a chat has used, and what that leaves for the next message, in words.
Counts no token itself: the figures are those of the last answer."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from app.chats import Chat
from app.texts import ENGLISH, Texts
from localmoe.chat.reasoning import split_reasoning

_NO_ROOM = 16  # tokens: what the template puts around a question and an answer


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Tokens. `about`: the last answer's thoughts are not given back to the model, and how many of its
    tokens they were is known by their share of the characters alone."""

    used: int
    context: int
    about: bool = False

    @property
    def left(self) -> int:
        """For the next message and its answer."""
        return max(0, self.context - self.used)

    @property
    def full(self) -> bool:
        """The next message would be refused."""
        return self.left <= _NO_ROOM


def context_use(chat: Chat | None, context: int) -> ContextUse | None:
    """After the last answer of the shown branch that was measured; None: there is none."""
    for message in reversed(chat.messages if chat is not None else ()):
        prompt, new = message.stats.get("prompt_tokens"), message.stats.get("new_tokens")
        if isinstance(prompt, int) and isinstance(new, int):
            split = split_reasoning(message.content)
            about = bool(split.thoughts)
            if about:
                new = round(new * len(split.answer) / len(message.content))
            return ContextUse(prompt + new, context, about)
    return None


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
    name, role = "lm-meter", ""
    if use.full:
        text = t(
            "The context of {context} tokens is full: another message would be refused. Begin a new chat, "
            "edit an earlier message, or load the model with a longer context under Settings.",
            context=context,
        )
        name, role = "lm-meter full", ' role="status"'
    elif use.left < min(max_new_tokens, use.context // 4) or use.left < use.context // 10:
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
    share = min(100.0, 100 * use.used / use.context)
    bar = f'<span class="lm-meter-bar" aria-hidden="true"><i style="width:{share:.1f}%"></i></span>'
    return f'<p class="{name}"{role}>{bar}<span>{escape(text)}</span></p>'


def _about(count: str, use: ContextUse, t: Texts) -> str:
    return t("about {count}", count=count) if use.about else count
