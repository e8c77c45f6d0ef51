"""`localmoe draft`: build a draft."""

from __future__ import annotations

import argparse
import sys

from localmoe.cli.draft_options import draft_settings
from localmoe.cli.output import ProgressBars
from localmoe.engine import build_draft
from localmoe.engine.drafts import DRAFT_BITS
from localmoe.engine.sources import CheckpointSource

_BY_LAYER = (
    "localmoe: the model has an MTP layer, which drafts on a GPU where the drafter is left to localmoe: with "
    "--drafter self this draft does."
)


def run_draft(args: argparse.Namespace) -> None:
    """Build a draft.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    settings = draft_settings(args)
    with ProgressBars() as progress:
        folder = build_draft(args.model, args.out, settings, progress=progress)
    print(folder)
    as_usual = args.out is None and settings.gptq.bits == DRAFT_BITS  # else loading it asks for it
    if as_usual and CheckpointSource.open(args.model).has_mtp():
        print(_BY_LAYER, file=sys.stderr)
