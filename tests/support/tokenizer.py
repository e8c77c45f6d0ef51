"""A tokenizer of one token a character, so that decoding and encoding again gives the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tokenizers
import transformers

SPECIAL_TOKENS = ("<pad>", "<s>", "<user>", "<assistant>", "<system>", "<end>")
VOCAB_SIZE = 256
END_TOKEN = SPECIAL_TOKENS.index("<end>")
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@cache
def characters() -> str:
    """The alphabet: newline, printable ASCII, then letters of other scripts until the vocabulary is full."""
    ascii_part = ["\n", *(chr(code) for code in range(0x20, 0x7F))]
    rest = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(ascii_part)
    return "".join([*ascii_part, *(chr(0x400 + i) for i in range(rest))])


def write_tokenizer(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    end_token: bool = False,
    more_special: Sequence[str] = (),
) -> None:
    """Save it as a model's tokenizer; with `end_token`, <end> ends an answer. more_special: tokens in the
    place of the last characters."""
    tokens = [*SPECIAL_TOKENS, *characters()][: VOCAB_SIZE - len(more_special)]
    vocab = {token: i for i, token in enumerate([*tokens, *more_special])}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<pad>"))
    raw.decoder = tokenizers.decoders.Fuse()
    raw.add_special_tokens([*SPECIAL_TOKENS, *more_special])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", **({"eos_token": "<end>"} if end_token else {})
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
