"""Turn a stream of token ids into a stream of text, never half a character. Holds no model."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokeniser:
    """Incremental decoding: text is released once later tokens can no longer change it.

    Tokens are decoded from a fixed anchor, which moves on whenever all text so far has been released; so
    the cost of a token does not grow with the answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # released tokens that still influence spacing
        self._pending: list[int] = []

    def add(self, tokens: list[int]) -> str:
        """New text, possibly empty while a character is incomplete."""
        self._pending.extend(tokens)
        return self._release(final=False)

    def finish(self) -> str:
        """What was held back; an incomplete character comes out as the replacement character."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        if whole.endswith(_REPLACEMENT) and not final:
            return ""
        # what is released begins and ends between characters, so it can be decoded on its own; tokens
        # without text (special ones) stay in front of it, because a decoder may drop the space before the
        # first text
        silent = not self._decode(self._pending)
        self._context = self._context + self._pending if silent else self._pending
        self._pending = []
        return whole[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
