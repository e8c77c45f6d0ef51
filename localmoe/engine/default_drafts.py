"""Which of a model's drafts in the default place is loaded, and what it will take in memory. Loads none."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from localmoe.core.draft_config import (
    METHODS,
    NF4_BITS,
    DraftForm,
    GptqSettings,
    Method,
    nf4_settings,
)
from localmoe.core.errors import DraftError
from localmoe.hub.catalogue import LocalModel, draft_folder
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.draft_places import NF4_KIND
from localmoe.quant.draft_checkpoint import DraftCheckpoint


def default_form(model: LocalModel, checkpoint: Checkpoint, bits: int) -> DraftForm:
    """Of the best whole draft of so many bits, by its headers; integers in groups of 128 where there is none
    yet."""
    if bits != NF4_BITS or not any(path.name == NF4_KIND for path in model.drafts):
        return DraftForm(bits)  # the other methods' are alike
    fingerprint = checkpoint.fingerprint()
    for method in METHODS:
        with suppress(DraftError):
            draft = DraftCheckpoint.open(_place(model, method, bits, fingerprint))
            draft.check_base(fingerprint, model.name, checkpoint.revision)
            return draft.form
    return DraftForm(bits)


def default_places(model: LocalModel, fingerprint: str, planned: DraftForm) -> list[Path]:
    """Where drafts may lie, the best first; not NF4's where its memory was not planned."""
    methods = (method for method in METHODS if method != "nf4" or planned.codebook)
    return [_place(model, method, planned.bits, fingerprint) for method in methods]


def _place(model: LocalModel, method: Method, bits: int, fingerprint: str) -> Path:
    settings = nf4_settings().gptq if method == "nf4" else GptqSettings(bits)
    return draft_folder(model, method, settings.bits, settings.group_size, fingerprint)
