"""Options of the lanes by which experts reach a pass. Parses nothing else."""

from __future__ import annotations

import argparse

from localmoe.core.config import LANES


def add_lane_options(parser: argparse.ArgumentParser) -> None:
    """--lanes, --strict and --cpu-threads."""
    parser.add_argument(
        "--lanes", choices=LANES, default="auto",
        help="where experts outside VRAM come from: PCIe, the CPU's own sums, or both",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true", help="the same bits whatever the settings: no sums on the CPU"
    )
    parser.add_argument("--cpu-threads", type=int, metavar="N", help="of the CPU lane; default: most cores")
