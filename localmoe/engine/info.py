"""What a loaded engine is, in words for people. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from localmoe.core.config import MAX_DRAFT_LENGTH
from localmoe.kernels.rows import RowPadding


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is, for people."""

    name: str
    architecture: str
    device: str
    dtype: str
    policy: str
    draft: str
    link: str
    context: int
    has_chat_template: bool
    exactness: str


def describe_exactness(rows: RowPadding | None) -> str:
    """Which promise holds on this machine, given what kernels.rows measured."""
    if rows is None:
        return "every token is the target's choice; the last bits may depend on the draft length"
    if rows.max_rows <= MAX_DRAFT_LENGTH:
        return (
            "exact: the same bits for any draft length, policy and VRAM budget "
            f"(drafts are at most {rows.max_rows - 1} tokens long on this device)"
        )
    return "exact: the same bits for any draft length, policy and VRAM budget"
