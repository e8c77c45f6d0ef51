"""`localmoe pull`: download a model from the Hub, or go on with a download."""

from __future__ import annotations

import argparse

from localmoe.cli.output import ProgressBars, note
from localmoe.core.units import format_bytes
from localmoe.hub.downloads import discard_download


def run_pull(args: argparse.Namespace) -> None:
    """Download, and print the model's folder.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    if args.discard:
        print(f"Freed {format_bytes(discard_download(args.model))}.")
        return
    from localmoe.engine.pulling import pull_model  # it needs transformers, to say what can be run

    with ProgressBars() as progress:
        folder = pull_model(args.model, args.revision, progress=progress)
    print(folder)
    note(f"localmoe generate {args.model} --prompt Hello")
