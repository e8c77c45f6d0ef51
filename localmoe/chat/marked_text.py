"""The text of an answer with some special tokens in it, which plain decoding drops. Knows no notation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from localmoe.chat.detokenise import Detokeniser


def special_marks(tokenizer: Any, marks: Iterable[str]) -> dict[int, str]:
    """Token id -> mark, of those that are one special token."""
    vocabulary: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    special = set(getattr(tokenizer, "all_special_ids", ()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special |= {token for token, one in added.items() if getattr(one, "special", False)}
    return {vocabulary[mark]: mark for mark in marks if vocabulary.get(mark) in special}


class MarkedText:
    """As Detokeniser, but for its marks."""

    def __init__(self, tokenizer: Any, marks: Mapping[int, str]) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self._text = Detokeniser(tokenizer)

    def add(self, tokens: list[int]) -> str:
        """New text, possibly empty."""
        return "".join(self._add(token) for token in tokens)

    def _add(self, token: int) -> str:
        mark = self._marks.get(token)
        if mark is None:
            return self._text.add([token])
        text = self._text.finish()
        self._text = Detokeniser(self._tokenizer)
        return text + mark

    def finish(self) -> str:
        """What was held back."""
        return self._text.finish()
