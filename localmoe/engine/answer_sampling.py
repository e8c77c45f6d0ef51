"""How an answer's tokens are chosen: by its sampling settings, among those that its schema allows, or those
of tools that it calls. Takes no step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from localmoe.chat.answer_schema import answer_grammar, call_rules, schema_rules
from localmoe.chat.call_grammar import calls_grammar
from localmoe.chat.lenient_grammar import LenientGrammar
from localmoe.chat.prompt import Encoder
from localmoe.chat.tool_formats import find_format
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError
from localmoe.speculative.grammar import Grammar
from localmoe.speculative.sampling import TokenSampler

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:  # imported with the first schema, which few need
    from localmoe.chat.token_grammar import AnswerGrammar, Vocabulary


class AnswerSampling:
    """Of one model's answers."""

    def __init__(self, encoder: Encoder, end_tokens: Collection[int]) -> None:
        self._encoder, self._end_tokens = encoder, end_tokens
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def prepare(self) -> None:
        """Look at the tokenizer's tokens, so that the first answer with a schema or tools need not wait for
        that (some 0.1 to 2 s). A tokenizer that grammars cannot use is told of there."""
        with suppress(ConfigError):
            self._looked_at()

    def sampler(self, request: GenerationRequest, prompt: Sequence[int]) -> TokenSampler:
        """For the answer to this prompt.

        Raises:
            ConfigError: its schema is none, or none that an answer can be held to.
        """
        if request.json_schema is None and not request.must_call:
            return TokenSampler(request.sampling, self._of_calls(request, prompt))
        try:
            lark = self._held(request, prompt)
        except RecursionError:
            raise ConfigError("The schema of the answer is nested too deep: make it flatter.") from None
        return TokenSampler(request.sampling, self._grammar(lark, prompt))

    def _held(self, request: GenerationRequest, prompt: Sequence[int]) -> str:
        """Rules of an answer that has to be JSON, or a call."""
        tokenizer, tools, schema = self._encoder.tokenizer, request.tools, request.json_schema
        if schema is None:
            rules = call_rules([tool for tool in tools if tool.name in request.must_call])
        elif not tools:
            rules = schema_rules(schema)
        else:
            ends = self._end_tokens
            lark = calls_grammar(tokenizer, prompt, tools, find_format(tokenizer), ends, schema=schema)
            if lark is None:
                raise ConfigError(
                    "Calls of tools cannot be told from JSON in this model's answers: leave the schema out, "
                    "or the tools."
                )
            return lark
        return answer_grammar(tokenizer, prompt, rules)

    def _grammar(self, lark: str, prompt: Sequence[int]) -> AnswerGrammar:
        return self._looked_at().grammar(lark, len(prompt))

    def _looked_at(self) -> Vocabulary:
        with self._making:
            if self._vocabulary is None:
                from localmoe.chat.token_grammar import Vocabulary

                self._vocabulary = Vocabulary(self._encoder.tokenizer, self._end_tokens)
            self._vocabulary.prepare()
            return self._vocabulary

    def _of_calls(self, request: GenerationRequest, prompt: Sequence[int]) -> Grammar | None:
        """Of an answer that may call tools; None: its calls are as the model writes them."""
        if not request.tools or request.continue_answer or request.draft_only:
            return None
        tokenizer = self._encoder.tokenizer
        try:
            notation = find_format(tokenizer)
            lark = calls_grammar(tokenizer, prompt, request.tools, notation, self._end_tokens)
            return None if lark is None else LenientGrammar(self._grammar(lark, prompt))
        except (ConfigError, RecursionError) as reason:  # nobody asked for it: the model may still be right
            _LOG.info("calls of tools are not held to their schemas: %s", reason)
            return None
