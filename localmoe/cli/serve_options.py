"""Options of `localmoe serve` beside those of loading and sampling. Parses nothing else."""

from __future__ import annotations

import argparse

from localmoe.cli.option_types import at_least, checked
from localmoe.server.settings import DEFAULT_MAX_WAITING, DEFAULT_PORT


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Where it listens, and to whom."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; other computers need --api-key"
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0: a free one"
    )
    parser.add_argument("--api-key", metavar="KEY", help="what clients have to send; or set LOCALMOE_API_KEY")
    parser.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN",
        help="a page that may ask from a browser, e.g. http://localhost:3000; repeat for more",
    )  # fmt: skip
    parser.add_argument(
        "--max-waiting", type=checked(at_least(0)), default=DEFAULT_MAX_WAITING, metavar="N",
        help=f"requests that wait beside the one that is answered; default: {DEFAULT_MAX_WAITING}",
    )  # fmt: skip
