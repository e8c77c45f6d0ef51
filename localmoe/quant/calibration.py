"""Calibration text for GPTQ: reads it, hashes it, cuts it into sequences of tokens. Runs no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from localmoe.core.bounded_file import read_text_bounded
from localmoe.core.draft_config import LEAST_SEQUENCES
from localmoe.core.errors import DraftError

MOST_BYTES = 256 << 20  # many times what is calibrated with
BUILT_IN = Path(__file__).resolve().parents[2] / "assets" / "calibration" / "multi_domain.jsonl"


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Documents to calibrate with.

    Attributes:
        name: for people; never a path.
        digest: SHA-256 (hex) of the documents.
    """

    name: str
    documents: tuple[str, ...]
    digest: str


def read_calibration(file: Path | None = None) -> CalibrationText:
    """The built-in documents of several domains, or a user's own: a .jsonl file with a "text" a line, or
    any other text file as one document.

    Raises:
        DraftError: the file cannot be read, is no UTF-8 text, or a line has no "text".
    """
    path = BUILT_IN if file is None else file
    try:
        content = read_text_bounded(path, MOST_BYTES)
    except OSError as error:
        raise DraftError(
            f"The calibration text {path} cannot be read ({error.strerror or error}): give another file."
        ) from error
    except UnicodeDecodeError as error:
        raise DraftError(f"The calibration text {path} is not UTF-8 text: give another file.") from error
    documents = _json_lines(path, content) if path.suffix == ".jsonl" else [content]
    documents = [text for text in documents if text.strip()]
    digest = hashlib.sha256()
    for text in documents:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    name = "built-in, several domains" if file is None else file.name
    return CalibrationText(name, tuple(documents), digest.hexdigest())


def _json_lines(path: Path, content: str) -> list[str]:
    documents = []
    for number, line in enumerate(
        content.split("\n"), 1
    ):  # splitlines knows ends that JSON allows inside a text
        if not line.strip():
            continue
        text = _text_of(line)
        if text is None:
            raise DraftError(
                f'Line {number} of the calibration text {path} is no JSON object with a "text": mend it, or '
                "give another file."
            )
        documents.append(text)
    return documents


def _text_of(line: str) -> str | None:
    """The "text" of a JSON object; None if there is none that can be written as UTF-8."""
    try:
        value = json.loads(line)
        text = value["text"] if isinstance(value, dict) else None
        if not isinstance(text, str):
            return None
        text.encode()  # half of a surrogate pair is no character
    except (ValueError, KeyError, RecursionError):
        return None
    return text


def cut_sequences(
    text: CalibrationText,
    encode: Callable[[str], Sequence[int]],
    *,
    num_tokens: int,
    length: int,
    seed: int,
) -> Tensor:
    """int64 (S, length): the documents in an order drawn from `seed`, one after the other, cut evenly.

    Args:
        encode: a document's token ids, with what the tokenizer puts around a text.
        num_tokens: wanted; fewer come back where the text is shorter.

    Raises:
        DraftError: the text is too short to calibrate with.
    """
    wanted = max(LEAST_SEQUENCES, num_tokens // length)
    tokens: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(text.documents)):
        tokens += encode(text.documents[index])
        if len(tokens) >= wanted * length:
            break
    found = min(wanted, len(tokens) // length)
    if found < LEAST_SEQUENCES:
        raise DraftError(
            f"The calibration text ({text.name}) has {len(tokens):,} tokens, and at least "
            f"{LEAST_SEQUENCES * length:,} are needed: give a longer one."
        )
    return torch.tensor(tokens[: found * length], dtype=torch.int64).view(found, length)
