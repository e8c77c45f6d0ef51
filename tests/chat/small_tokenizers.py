"""Tokenizers of the two kinds that models come with: byte-level (the demo model's own) and byte-fallback."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo-moe"
HARMONY_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
)
HARMONY_LETTERS = 'abcdefghijklmnopqrstuvwxyz <>/\n=._{}:0123456789,"'
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@cache
def byte_level() -> Any:
    """The demo model's tokenizer: one byte-level BPE, as Qwen, OLMoE and gpt-oss have."""
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@cache
def byte_fallback() -> Any:
    """As Mixtral's and Phi's: a space is a letter of its own, and unknown characters are spelt in bytes."""
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), space, *"abcdefghijklmnopqrstuvwxyz.,é"]:
        vocab[piece] = len(vocab)
    raw = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    raw.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@cache
def channels() -> Any:
    """A tokenizer of one token a letter, with gpt-oss's marks as special tokens."""
    vocab = {piece: i for i, piece in enumerate([*HARMONY_MARKS, *HARMONY_LETTERS])}
    raw = tokenizers.Tokenizer(models.BPE(vocab, []))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(list(HARMONY_MARKS))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)


@cache
def thinking_marks(special: bool | None) -> Any:
    """The demo model's with the marks of thoughts as tokens: of text, as Qwen3's are, or special ones; None:
    no tokens, but the chat template knows them, as Hunyuan's does."""
    made = transformers.AutoTokenizer.from_pretrained(DEMO)
    if special is None:
        made.chat_template = "{{ messages }}<think>"
        return made
    marks = [tokenizers.AddedToken(mark, special=special) for mark in ("<think>", "</think>")]
    made.add_tokens(marks, special_tokens=special)
    return made


@cache
def special_thoughts(opening: str, closing: str) -> Any:
    """The demo model's with these marks of thoughts as special tokens."""
    made = transformers.AutoTokenizer.from_pretrained(DEMO)
    marks = [tokenizers.AddedToken(mark, special=True, normalized=False) for mark in (opening, closing)]
    made.add_tokens(marks, special_tokens=True)
    return made


def copy_tokenizer(folder: Path) -> Path:
    """The demo model's tokenizer files in a folder of their own."""
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)
    return folder
