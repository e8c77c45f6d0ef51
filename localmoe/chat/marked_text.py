"""The text of an answer with some special tokens in it, which plain decoding drops. Knows no notation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
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

    def __init__(
        self, tokenizer: Any, marks: Mapping[int, str], labels: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """labels: text that is left out where it follows a mark."""
        self._tokenizer, self._marks, self._labels = tokenizer, marks, labels
        self._text = Detokeniser(tokenizer)
        self._label = self._held = ""  # the label that may follow, and what there is of it

    def add(self, tokens: list[int]) -> str:
        """New text, possibly empty."""
        return "".join(self._add(token) for token in tokens)

    def _add(self, token: int) -> str:
        mark = self._marks.get(token)
        if mark is None:
            return self._behind_label(self._text.add([token]))
        text = self.finish()
        self._text = Detokeniser(self._tokenizer)
        self._label, self._held = self._labels.get(token, ""), ""
        return text + mark

    def _behind_label(self, text: str) -> str:
        if not self._label:
            return text
        self._held += text
        if len(self._held) < len(self._label) and self._label.startswith(self._held):
            return ""
        text, self._label = self._held.removeprefix(self._label), ""
        return text

    def finish(self) -> str:
        """What was held back."""
        return self._behind_label(self._text.finish())
