"""How an answer's tokens are chosen: by its sampling settings, among those that its schema allows, or that of
a tool which it has to call. Takes no step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from localmoe.chat.answer_schema import answer_grammar, call_rules, schema_rules
from localmoe.chat.prompt import Encoder
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError
from localmoe.speculative.sampling import TokenSampler

if TYPE_CHECKING:  # imported with the first schema, which few need
    from localmoe.chat.token_grammar import Vocabulary


class AnswerSampling:
    """Of one model's answers."""

    def __init__(self, encoder: Encoder, end_tokens: Collection[int]) -> None:
        self._encoder, self._end_tokens = encoder, end_tokens
        self._vocabulary: Vocabulary | None = None

    def sampler(self, request: GenerationRequest, prompt: Sequence[int]) -> TokenSampler:
        """For the answer to this prompt.

        Raises:
            ConfigError: its schema is none, or none that an answer can be held to.
        """
        if request.json_schema is None and not request.must_call:
            return TokenSampler(request.sampling)
        try:
            rules = _rules(request)
        except RecursionError:
            raise ConfigError("The schema of the answer is nested too deep: make it flatter.") from None
        if self._vocabulary is None:
            from localmoe.chat.token_grammar import Vocabulary

            self._vocabulary = Vocabulary(self._encoder.tokenizer, self._end_tokens)
        lark = answer_grammar(self._encoder.tokenizer, prompt, rules)
        return TokenSampler(request.sampling, self._vocabulary.grammar(lark, len(prompt)))


def _rules(request: GenerationRequest) -> str:
    if request.json_schema is not None:
        return schema_rules(request.json_schema)
    return call_rules([tool for tool in request.tools if tool.name in request.must_call])
