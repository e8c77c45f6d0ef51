"""Whether and how long a reasoning model thinks before it answers, as its chat template lets one choose.

Two ways are in use: a switch (`enable_thinking`, or `thinking`), and an effort (`reasoning_effort`). Which of
them a template has is found by rendering it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localmoe.chat.templates import as_parts, takes_parts
from localmoe.core.config import Thinking

_LEVELS: tuple[Thinking, ...] = ("low", "medium", "high")
_ON: dict[str, Any] = {"enable_thinking": True, "thinking": True}
_OFF: dict[str, Any] = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True, slots=True)
class ThinkingWays:
    """What a template lets one choose.

    Attributes:
        switch: whether it thinks at all.
        efforts: from the least to the greatest; () if there is no such choice.
    """

    switch: bool
    efforts: tuple[str, ...]

    @property
    def choices(self) -> tuple[Thinking, ...]:
        """Those that make a difference, beside "auto"."""
        switched: tuple[Thinking, ...] = ("off", "on") if self.switch or self.efforts[:1] == ("none",) else ()
        return switched + tuple(level for level in _LEVELS if level in self.efforts)

    def variables(self, thinking: Thinking) -> dict[str, Any]:
        """For the template. What the model does not know is left to it, but for the nearest that it does:
        where thoughts cannot be switched off, they are as short as they can be."""
        if thinking == "auto":
            return {}
        found: dict[str, Any] = {}
        if self.switch:
            found |= _OFF if thinking == "off" else _ON
        if self.efforts and thinking == "off" and not self.switch:
            found["reasoning_effort"] = self.efforts[0]
        elif self.efforts and thinking == "on" and self.efforts[0] == "none":
            found["reasoning_effort"] = self.efforts[-1]
        elif self.efforts and thinking in _LEVELS:
            at_least = [level for level in _LEVELS[_LEVELS.index(thinking) :] if level in self.efforts]
            found["reasoning_effort"] = next(iter(at_least), self.efforts[-1])
        return found


NO_WAYS = ThinkingWays(False, ())


def find_ways(tokenizer: Any) -> ThinkingWays:
    """Of a tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return NO_WAYS
    said = as_parts("?") if takes_parts(tokenizer) else "?"
    switch = _rendered(tokenizer, said, _OFF) != _rendered(tokenizer, said, _ON)
    levels: tuple[str, ...] = ("none", *_LEVELS)
    texts = {level: _rendered(tokenizer, said, {"reasoning_effort": level}) for level in levels}
    taken: list[str] = [level for level in _LEVELS if texts[level] is not None]
    if "low" not in taken and texts["none"] is not None:  # else any word is written into the prompt as it is
        taken = ["none", *taken]
    differ = len({texts[level] for level in taken}) > 1
    return ThinkingWays(switch, tuple(taken) if differ else ())


def _rendered(tokenizer: Any, said: object, variables: dict[str, Any]) -> str | None:
    turns = [{"role": "user", "content": said}]
    try:
        text: str = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **variables
        )
    except Exception:  # a template is a program: it may raise anything
        return None
    return text
