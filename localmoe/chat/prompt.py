"""Turn a request into prompt token ids: the model's chat template for messages, plain tokenising for a raw
prompt, ids as they are. Decides no truncation: a prompt that does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import transformers

from localmoe.chat.begun_answer import begun_text
from localmoe.chat.fitting import fitting, known, too_long
from localmoe.chat.image_parts import ImageTokens, images_of, with_images
from localmoe.chat.said_text import SaidText, piece_ids
from localmoe.chat.templates import adopt_template, as_parts, as_turns, in_own_form, knows_tools, takes_parts
from localmoe.chat.thinking import NO_WAYS, ThinkingWays, find_ways
from localmoe.chat.tokenizer_errors import reading_tokenizer
from localmoe.chat.turn_taking import tellings
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import CheckpointError, ConfigError, sentence_of
from localmoe.core.tools import Tool
from localmoe.core.types import Message

_VOCABULARIES = {
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
}
# a text of more characters a token of the context is looked at first up to there: what is far too long would
# take seconds to be tokenised, in which nobody else is answered
_LOOKED_AT = 16
_READS_NO_PICTURES = "This model reads no pictures: ask without them, or load one that does."


class Encoder(Protocol):
    """Turns requests into token ids; `tokenizer` turns ids into text (Detokeniser)."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, or what decodes like one."""

    @property
    def has_template(self) -> bool:
        """Whether messages are wrapped in a chat template."""

    @property
    def thinking(self) -> ThinkingWays:
        """What one may choose of how it thinks."""

    @property
    def images(self) -> ImageTokens | None:
        """How it reads pictures; None: it reads none."""

    def encode(self, request: GenerationRequest, context: int) -> list[int]:
        """Prompt token ids; raises ConfigError or ContextLengthError."""

    def count(self, text: str) -> int:
        """Tokens of a text by itself; raises ConfigError where there is no tokenizer."""


class PromptEncoder:
    """A model's tokenizer and chat template.

    Attributes:
        images, thinking: see Encoder.
    """

    thinking: ThinkingWays

    def __init__(
        self, folder: Path, vocab_size: int | None = None, *, images: ImageTokens | None = None
    ) -> None:
        """
        Args:
            vocab_size: of the model, which may be padded; None: as large as the tokenizer's.
            images: how it reads pictures; None: it reads none.
        """
        self._folder, self.images = folder, images
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if not any(name in _VOCABULARIES or name.endswith(".tiktoken") for name in names):
            # transformers would make up an empty tokenizer
            raise CheckpointError(
                f"There is no tokenizer in {folder}: download the model's tokenizer.json too."
            )
        with reading_tokenizer(folder):
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self.tokenizer("")  # its first use may change its settings, which no two threads may do at once
        self._vocab_size = len(self.tokenizer) if vocab_size is None else vocab_size
        adopt_template(self.tokenizer, folder)
        self._parts = self.has_template and takes_parts(self.tokenizer)
        self._knows_tools: bool | None = None  # not looked at yet
        place = None if images is None else self.tokenizer.convert_ids_to_tokens(images.token_id)
        self._said = SaidText(self.tokenizer, (place,) if isinstance(place, str) else ())
        self.thinking = find_ways(self.tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, request: GenerationRequest, context: int) -> list[int]:
        """Prompt token ids.

        Raises:
            ConfigError: the template does not accept the messages or knows no tools, the prompt is empty, a
                token id, given or the tokenizer's, is none of this model's, or pictures cannot be read.
            ContextLengthError: no room is left for an answer.
            CheckpointError: the tokenizer is damaged in a way that shows with this text.
        """
        if request.prompt_token_ids is not None:
            ids = known(request.prompt_token_ids, self._vocab_size)
            return fitting(ids, context, self._max_context)
        if request.prompt is not None:
            ids = self._raw(request.prompt, context)
        else:
            ids = self._chat(request, context)
        if ids and max(ids) >= self._vocab_size:
            raise ConfigError(
                f"The tokenizer in {self._folder} writes token {max(ids)}, but this model has only 0 to "
                f"{self._vocab_size - 1}: they do not belong together, so download the model again."
            )
        return fitting(ids, context, self._max_context)

    def count(self, text: str) -> int:
        """Tokens of what is said in a chat, without a template around it. Any thread may ask.

        Raises:
            ConfigError: the text is no valid Unicode. CheckpointError: the tokenizer is damaged.
        """
        mark = ""
        if self.has_template:
            said, mark = self._said.marked([Message("user", text)], None)
            text = said.messages[0].content
        return len(self._tokens(text, None, mark, add_special_tokens=False, verbose=False))

    def _raw(self, prompt: str, context: int) -> list[int]:
        return self._tokens(prompt, context)

    def _tokens(self, text: str, context: int | None, mark: str = "", **options: bool) -> list[int]:
        """Any text's ids, unless it is plain that they do not fit into the context. Tokenizers take no lone
        surrogates, which stand for bytes that are no UTF-8 and for halves of a pair in JSON.

        Args:
            mark: where control tokens' names are broken (SaidText).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"The prompt holds {text[error.start]!a}, which is no valid Unicode: write it in UTF-8."
            ) from None
        if context is not None and len(text) > _LOOKED_AT * context:
            begun = len(self._pieces(text[: _LOOKED_AT * context], mark, options))
            if begun >= 2 * context:  # twice: where a text is cut, its tokens may be others
                raise too_long(begun, context, self._max_context, counted=False)
        return self._pieces(text, mark, options)

    def _pieces(self, text: str, mark: str, options: Mapping[str, bool]) -> list[int]:
        with reading_tokenizer(self._folder):
            return piece_ids(text, mark, lambda piece: list(self.tokenizer(piece, **options)["input_ids"]))

    def _max_context(self) -> int | None:
        """What the model was made for; None where its config does not say."""
        try:
            config = transformers.AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
        except Exception:  # the prompt is refused anyway; what is wrong with a config is for the load to say
            return None
        found = getattr(config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    def _chat(self, request: GenerationRequest, context: int) -> list[int]:
        """The messages, and the beginning of an answer that is continued.

        The latter goes after the prompt that the model had answered, so that it reads what it had written.
        That is what transformers' `continue_final_message` gives where a template leaves answers as they are;
        those of reasoning models change them (thoughts are cut out or given another frame)."""
        if request.tools:
            self._check_tools()
        messages = request.messages[:-1] if request.continue_answer else request.messages
        begun = request.messages[-1] if request.continue_answer else None
        images = images_of(request.messages)
        if images:
            self._check_images(begun)
        if not self.has_template:
            return self._raw(_plain_dialogue(messages) + (begun.content if begun else ""), context)
        said, mark = self._said.marked(in_own_form(self.tokenizer, messages), begun, request.tools)
        text = self._rendered(said.messages, said.tools, self.thinking.variables(request.thinking))
        if said.begun is not None and said.begun.content:
            text = begun_text(self.tokenizer, text, said.begun)
        ids = self._tokens(text, context, mark, add_special_tokens=False)
        return with_images(ids, images, self.images) if images and self.images else ids

    def _check_images(self, begun: Message | None) -> None:
        if self.images is None:
            raise ConfigError(_READS_NO_PICTURES)
        if not self.has_template:
            raise ConfigError(
                "This model has no chat template, and pictures need one: ask without them, or load another."
            )
        if begun is not None and begun.images:
            raise ConfigError("The answer that goes on has pictures, which no model writes: leave them out.")

    def _check_tools(self) -> None:
        if self._knows_tools is None:
            self._knows_tools = self.has_template and knows_tools(self.tokenizer)
        if not self._knows_tools:
            raise ConfigError(
                "The model's chat template knows no tools: ask without them, or use a model that calls tools."
            )

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> str:
        form: Callable[[str], object] = as_parts if self._parts else str
        refused: Exception | None = None
        for told, parsed in tellings(messages):
            try:
                text: str = self.tokenizer.apply_chat_template(
                    as_turns(told, form, parsed=parsed), tools=[tool.as_dict() for tool in tools] or None,
                    tokenize=False, add_generation_prompt=True, **variables,
                )  # fmt: skip
                return text
            except Exception as error:  # a template is a program: it may raise anything
                refused = refused or error
        assert refused is not None
        raise ConfigError(
            f"The model's chat template refuses this conversation: {sentence_of(refused)}"
        ) from refused


class TokenEncoder:
    """For a model without words: prompts are token ids, and answers have no text."""

    def __init__(self, vocab_size: int) -> None:
        self.tokenizer = _Wordless()
        self.has_template = False
        self.thinking, self.images = NO_WAYS, None
        self._vocab_size = vocab_size

    def encode(self, request: GenerationRequest, context: int) -> list[int]:
        """Prompt token ids.

        Raises:
            ConfigError: the request has no token ids, or one is none of this model's.
            ContextLengthError: no room is left for an answer.
        """
        if images_of(request.messages):
            raise ConfigError(_READS_NO_PICTURES)
        if request.prompt_token_ids is None:
            raise ConfigError("This model has no tokenizer: give the prompt as token ids.")
        return fitting(known(request.prompt_token_ids, self._vocab_size), context)

    def count(self, text: str) -> int:
        """Raises ConfigError: there are no words to count tokens of."""
        raise ConfigError("This model has no tokenizer: give the prompt as token ids.")


class _Wordless:
    """Decodes every token to nothing."""

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        return ""


def _plain_dialogue(messages: Sequence[Message]) -> str:
    """For base models without a template: a lone user message as it is, a dialogue as labelled lines."""
    if len(messages) == 1:
        return messages[0].content
    lines = [f"{message.role.capitalize()}: {message.content}" for message in messages]
    return "\n".join([*lines, "Assistant:"])
