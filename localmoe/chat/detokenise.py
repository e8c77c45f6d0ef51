"""Turn a stream of token ids into a stream of text, never half a character. Holds no model."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character, and so tokens that it may take
_BROKEN = 2 * _LONGEST  # replacement characters in a row that are more than a character on its way
_SILENT = 8  # tokens without text that are looked at before what follows


class Detokeniser:
    """Incremental decoding: text is released once later tokens can no longer change it.

    Tokens are decoded from a fixed anchor, which moves on whenever all text so far has been released, and
    along a row of broken characters, which may not end; so the cost of a token does not grow with the answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # released tokens that still influence spacing
        self._anchor = 1  # of those that have to stay, the first ones
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
        count = len(self._pending)
        if whole.endswith(_REPLACEMENT) and not final:
            count = self._broken(before, whole)
            whole = self._decode(self._context + self._pending[:count])
        self._move_on(count)
        return whole[len(before) :]

    def _broken(self, before: str, whole: str) -> int:
        """Pending tokens whose characters are broken whatever comes: 0 unless there are so many that waiting
        for the end of them might be for ever. Characters that are whole but for the last one may look so
        too, but not wherever they are cut."""
        shown = whole[len(before) :]
        if not whole.startswith(before) or len(shown) - len(shown.rstrip(_REPLACEMENT)) <= _BROKEN:
            return 0
        at, kept = len(self._pending), 0
        while at and kept < _LONGEST:
            at -= 1
            kept += bool(self._decode(self._pending[at : at + 1]))
        lengths = range(max(0, at - _LONGEST + 1), at + 1)
        cuts = [self._decode(self._context + self._pending[:length]) for length in lengths]
        return at if all(cut.endswith(_REPLACEMENT) and whole.startswith(cut) for cut in cuts) else 0

    def _move_on(self, count: int) -> None:
        """The first pending tokens have been released, between characters, so what follows can be decoded
        behind them alone; tokens without text (special ones) stay behind what was there before, because a
        decoder may drop the space before the first text: the last of many, as only neighbours matter."""
        released, self._pending = self._pending[:count], self._pending[count:]
        if self._decode(released):
            self._context, self._anchor = released, count
        else:
            self._context = self._context + released
            if len(self._context) > self._anchor + 2 * _SILENT:
                del self._context[self._anchor : -_SILENT]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
