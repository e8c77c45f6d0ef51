"""Tokenizer and token files of the demo model: a byte-level BPE, rendered chats, documents as uint16 tokens.

A token file holds documents end to end; bit 15 of an entry says that the token carries no loss. The order
and mix in which documents are read is the trainer's.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
from demo_data import Document, Splits
from demo_sources import SOURCES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB = 4096
MAX_POSITIONS = 1024
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NO_LOSS = 1 << 15
BPE_CHARS_PER_SOURCE = 2_500_000
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def plain_text(document: Document) -> str:
    """What a document says, without roles."""
    return document if isinstance(document, str) else "\n".join(m["content"] for m in document)


def train_tokenizer(splits: dict[str, Splits], out: Path, seed: int = 1) -> Tokenizer:
    """Byte-level BPE with single digits, trained on an even sample of the sources; saved for transformers."""
    rng = random.Random(seed)
    sample: list[str] = []
    for source in SOURCES:
        documents = list(splits[source.name][0])
        rng.shuffle(documents)
        limit = BPE_CHARS_PER_SOURCE // (8 if source.group in ("code", "word problems") else 1)
        for document in documents:
            text = plain_text(document)
            sample.append(text)
            limit -= len(text)
            if limit <= 0:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sample,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=[END_OF_TEXT, IM_START, IM_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[IM_START],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return tokenizer


def render(document: Document, answers_only: bool) -> list[tuple[str, bool]]:
    """(text, carries loss) parts of a document as the chat template writes it, and the end-of-text mark."""
    if isinstance(document, str):
        return [(document, True), (END_OF_TEXT, True)]
    parts: list[tuple[str, bool]] = []
    for message in document:
        learn = not answers_only or message["role"] == "assistant"
        parts.append((f"{IM_START}{message['role']}\n", not answers_only))
        parts.append((message["content"] + IM_END, learn))
        parts.append(("\n", not answers_only))
    return [*parts, (END_OF_TEXT, not answers_only)]


def encode_document(tokenizer: Tokenizer, document: Document, answers_only: bool) -> np.ndarray:
    """uint16 entries of one document; a chat that is too long loses its last turns."""
    entries: list[int] = []
    for text, learn in render(document, answers_only):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        entries += ids if learn else [i | NO_LOSS for i in ids]
    return np.array(entries[: MAX_POSITIONS + 1], dtype=np.uint16)


def write_tokens(tokenizer: Tokenizer, splits: dict[str, Splits], part: int, stem: Path) -> dict[str, int]:
    """Writes `stem`.npz (tokens, length and source of each document); tokens by source."""
    arrays, lengths, sources, totals = [], [], [], {}
    for number, source in enumerate(SOURCES):
        documents = splits[source.name][part]
        encoded = [encode_document(tokenizer, d, source.answers_only) for d in documents]
        totals[source.name] = sum(map(len, encoded))
        arrays += encoded
        lengths += [len(e) for e in encoded]
        sources += [number] * len(encoded)
    np.savez_compressed(
        stem.with_suffix(".npz"),
        tokens=np.concatenate(arrays),
        lengths=np.array(lengths, np.uint16),
        sources=np.array(sources, np.uint8),
    )
    return totals


def prepare(splits: dict[str, Splits], out: Path) -> None:
    """Tokenizer, training and held-out token files and what is in them, in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(splits, out / "tokenizer")
    totals = [
        write_tokens(tokenizer, splits, part, out / stem) for part, stem in enumerate(("train", "valid"))
    ]
    rows = [
        asdict(s)
        | {
            "documents": len(splits[s.name][0]),
            "train_tokens": totals[0][s.name],
            "valid_tokens": totals[1][s.name],
        }
        for s in SOURCES
    ]
    (out / "sources.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        counts = (
            f"{row['documents']:7} documents {row['train_tokens']:9} tokens {row['valid_tokens']:8} held out"
        )
        print(f"{row['name']:26} {counts}")
    print(f"training tokens: {sum(totals[0].values()):,}; held out: {sum(totals[1].values()):,}")
