"""`localmoe draft`: build a draft."""

from __future__ import annotations

import argparse

from localmoe.cli.draft_options import draft_settings
from localmoe.cli.output import ProgressBars
from localmoe.engine import build_draft


def run_draft(args: argparse.Namespace) -> None:
    """Build a draft.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    with ProgressBars() as progress:
        folder = build_draft(
            args.model,
            args.out,
            draft_settings(args),
            progress=progress,
        )
    print(folder)
