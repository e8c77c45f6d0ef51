"""Which tokens of a tokenizer a grammar allows after a text, by llguidance. Knows no model and no JSON."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import llguidance.hf
import numpy as np
import torch
import transformers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.errors import ConfigError

# llguidance's own: where in the grammar, what state it is in, and options that nobody can set here
_INSIDE = re.compile(
    r"^at \d+\(\d+\): |failed to compile JSON schema: |failed to parse \"%json\": |\n +\d+ \| .*"
    r"|<[a-z-]+/?>.*|; consider making .*|\. Enable 'coerce_one_of' option .*",
    re.DOTALL,
)
_LONGEST = 300  # characters of its reason
_ROWS = 20_000  # items of its parser: some 5,000 properties that may be left out
_KEPT = 4  # grammars: each turn of an agent has the same tools


class Vocabulary:
    """A tokenizer's tokens as grammars need them, looked at when the first one is made (some 0.1 to 2 s), or
    before."""

    def __init__(self, tokenizer: Any, end_tokens: Collection[int]) -> None:
        """end_tokens: which end an answer, allowed where the grammar is satisfied, and only there."""
        self._tokenizer, self._end_tokens = tokenizer, frozenset(end_tokens)
        self._made: LLTokenizer | None = None
        self._kept: dict[str, LLMatcher] = {}  # where no answer has begun, the last used one last

    def prepare(self) -> None:
        """Look at them now. Raises ConfigError: see `grammar`."""
        self._tokens()

    def grammar(self, lark: str, begins: int) -> AnswerGrammar:
        """Of an answer that begins behind `begins` tokens. To compile one takes 5 to 200 ms where there are
        tools; those that were used last are kept.

        Args:
            lark: in llguidance's dialect of Lark.

        Raises:
            ConfigError: the grammar, or this tokenizer, is none that can be used.
        """
        tokens = self._tokens()
        matcher = self._kept.pop(lark, None) or self._compiled(lark, tokens)
        self._kept[lark] = matcher
        for old in list(self._kept)[:-_KEPT]:
            self._kept.pop(old, None)
        return AnswerGrammar(matcher.deep_copy(), begins, self._end_tokens, tokens.vocab_size)

    def _compiled(self, lark: str, tokens: LLTokenizer) -> LLMatcher:
        grammar = LLMatcher.grammar_from_lark(lark)
        limits = LLParserLimits(max_items_in_row=_ROWS, verbose_errors=False)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        AnswerGrammar(matcher, 0, self._end_tokens, tokens.vocab_size).check()
        return matcher

    def _tokens(self) -> LLTokenizer:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> LLTokenizer:
        if not isinstance(self._tokenizer, transformers.PreTrainedTokenizerFast):
            raise _no_schema(f"its tokenizer is of the kind {type(self._tokenizer).__name__}")
        # some configs name -1 beside others, or a row that only pads the vocabulary
        ends = sorted(self._end_tokens.intersection(self._tokenizer.get_vocab().values()))
        if not ends:
            raise _no_schema("it names no token that ends an answer")
        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, eos_token=ends)
        except ValueError as error:
            raise _no_schema(f"its tokenizer is of a kind that is not known, {error}") from None


class AnswerGrammar:
    """The grammar of one answer (speculative.grammar.Grammar)."""

    def __init__(self, matcher: LLMatcher, begins: int, end_tokens: frozenset[int], vocab_size: int) -> None:
        """begins: tokens of the prompt, of which the grammar knows nothing."""
        self._matcher, self._begins, self._end_tokens = matcher, begins, end_tokens
        self._vocab_size = vocab_size
        self._taken: list[int] = []  # what the matcher stands behind

    def allowed(self, text: Sequence[int], count: int) -> Tensor | None:
        """As the protocol says.

        Raises:
            ConfigError: the grammar takes more than it may.
        """
        if self._go_to(text) < len(text):
            return None
        bits = self._bits()
        found = np.unpackbits(bits, count=min(count, 8 * len(bits)), bitorder="little")
        return torch.from_numpy(np.pad(found, (0, count - len(found))).view(np.bool_))

    def free(self, text: Sequence[int]) -> bool:
        """As the protocol says, of the tokenizer's. Raises as `allowed`."""
        if self._go_to(text) < len(text):
            return False
        bits, (whole, rest) = self._bits(), divmod(self._vocab_size, 8)
        return bool((bits[:whole] == 0xFF).all()) and (not rest or bits[whole] | -1 << rest & 0xFF == 0xFF)

    def _bits(self) -> NDArray[np.uint8]:
        """One a token that may follow what the matcher stands behind."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._refuse_errors()
        return bits

    def valid(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """As the protocol says, one by one as `allowed` says: where it leaves no choice but of how a text is
        cut into tokens, it allows the one token alone that a tokenizer would use. Raises as `allowed`."""
        if self._go_to(text) < len(text):
            return 0
        for count, token in enumerate(tokens):
            if token in self._end_tokens:
                return count + bool(self._matcher.is_accepting())
            if self._forced()[:1] not in ([], [token]) or not self._take([token]):
                return count
        return len(tokens)

    def forced(self, text: Sequence[int]) -> list[int]:
        """As the protocol says. Raises as `allowed`."""
        return [] if self._go_to(text) < len(text) else self._forced()

    def _forced(self) -> list[int]:
        found: list[int] = self._matcher.compute_ff_tokens()
        self._refuse_errors()
        return found

    def _take(self, tokens: list[int]) -> int:
        """As many of them as the grammar takes, however they cut the text."""
        taken: int = self._matcher.try_consume_tokens(tokens)
        self._refuse_errors()
        self._taken += tokens[:taken]
        return taken

    def _go_to(self, text: Sequence[int]) -> int:
        """As far as the text is allowed and has not ended; how many tokens that are."""
        wanted, stands = list(text[self._begins :]), len(self._taken)
        if wanted[:stands] != self._taken:
            pairs = enumerate(zip(wanted, self._taken, strict=False))
            agree = next((i for i, (token, taken) in pairs if token != taken), min(len(wanted), stands))
            self._matcher.rollback(stands - agree)
            del self._taken[agree:]
        new = wanted[len(self._taken) :]
        new = new[: next((i for i, token in enumerate(new) if token in self._end_tokens), len(new))]
        if new:
            self._take(new)
        return self._begins + len(self._taken)

    def check(self) -> None:
        """Whether an answer can begin.

        Raises:
            ConfigError: none can.
        """
        self._refuse_errors()
        self._matcher.compute_bitmask()
        self._refuse_errors()

    def _refuse_errors(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())


def _no_schema(reason: str) -> ConfigError:
    return ConfigError(f"Answers of this model cannot be held to a schema: {reason}.")


def _refusal(error: str) -> ConfigError:
    """llguidance's message without what is inside it."""
    reason = " ".join(_INSIDE.sub("", error).split()).rstrip(".")
    reason = "it describes no value" if reason == "NoExtensionBias" else reason
    shown = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]} …"
    return ConfigError(f"No answer can be held to this schema: {shown}.")
