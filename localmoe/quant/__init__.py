"""Low-bit drafts of a model's routed experts: build, write, read. Runs no model."""

from localmoe.quant.builder import DraftCancelledError, ExpertSource, build_rtn_draft
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.draft_format import DraftProvenance, ExpertNaming
from localmoe.quant.draft_writer import DraftWriter

__all__ = [
    "DraftCancelledError",
    "DraftCheckpoint",
    "DraftProvenance",
    "DraftWriter",
    "ExpertNaming",
    "ExpertSource",
    "build_rtn_draft",
]
