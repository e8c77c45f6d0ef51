"""A model's chat template: where it lies, and in which of two forms it takes what a message says. Decides no
wording.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localmoe.core.errors import CheckpointError

_LEGACY_FILE = "chat_template.json"
_PROBE = "localmoe-7f3a"  # no template says it by itself


def adopt_template(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer without a template that of chat_template.json, where older models for text and
    pictures have it: transformers reads that file for pictures' processors alone.

    Raises:
        CheckpointError: the file holds no template.
    """
    path = folder / _LEGACY_FILE
    if getattr(tokenizer, "chat_template", None) or not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    template = found.get("chat_template") if isinstance(found, dict) else None
    if not isinstance(template, str):
        raise CheckpointError(f"{path} holds no chat template: download the model again.")
    tokenizer.chat_template = template


def takes_parts(tokenizer: Any) -> bool:
    """Whether its template leaves out what a message says unless that is a list of parts, as some of models
    for text and pictures do."""
    return not _shows(tokenizer, _PROBE) and _shows(tokenizer, as_parts(_PROBE))


def as_parts(content: str) -> list[dict[str, str]]:
    """A text as such a template takes it."""
    return [{"type": "text", "text": content}]


def _shows(tokenizer: Any, content: object) -> bool:
    turns = [{"role": "user", "content": content}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program: it may raise anything
        return False
    return _PROBE in text
