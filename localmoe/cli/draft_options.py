"""The options of `localmoe draft`, and the settings that they describe. Builds nothing."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from localmoe.cli.option_types import checked
from localmoe.core.draft_config import (
    BITS,
    GPTQ_BUDGET_BYTES,
    GROUP_SIZES,
    METHODS,
    NF4_GROUP_SIZE,
    DraftSettings,
    GptqSettings,
    nf4_settings,
)
from localmoe.core.units import parse_bytes


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """What `localmoe draft` takes beside the model."""
    gptq = GptqSettings()
    parser.add_argument(
        "--method",
        default="gptq",
        choices=METHODS,
        help="gptq: calibrated, minutes; nf4: by bitsandbytes, uncalibrated; rtn: rounded, seconds",
    )
    parser.add_argument("--bits", type=int, choices=BITS, help=f"default: {gptq.bits}")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        help=f"default: {gptq.group_size}, with nf4 {NF4_GROUP_SIZE}",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to put it (default: where loading looks)"
    )
    group = parser.add_argument_group("gptq")
    group.add_argument(
        "--calibration", type=Path, metavar="FILE", help=".jsonl with a text a line, or any text"
    )
    group.add_argument("--calibration-tokens", type=int, metavar="N", help=f"default: {gptq.num_tokens}")
    group.add_argument("--seed", type=int, metavar="N", help=f"default: {gptq.seed}")
    group.add_argument(
        "--gate-weighted",
        action=argparse.BooleanOptionalAction,
        help="a token counts by the square of its router weight (the default), else once",
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument(
        "--vram-budget",
        type=checked(parse_bytes),
        default=GPTQ_BUDGET_BYTES,
        metavar="SIZE",
        help="device memory to build in; default: 8GiB",
    )
    parser.set_defaults(check=partial(_check, parser))


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what a method that is not calibrated would ignore."""
    if args.method == "gptq":
        return
    for name in ("calibration", "calibration_tokens", "seed", "gate_weighted"):
        if getattr(args, name) is not None:
            parser.error(
                f"--method {args.method} is not calibrated: leave --{name.replace('_', '-')} out, or use "
                "--method gptq"
            )


def draft_settings(args: argparse.Namespace) -> DraftSettings:
    """The DraftSettings that draft's options describe.

    Raises:
        ConfigError: a value is out of range.
    """
    default = nf4_settings().gptq if args.method == "nf4" else GptqSettings()
    gptq = GptqSettings(
        bits=default.bits if args.bits is None else args.bits,
        group_size=default.group_size if args.group_size is None else args.group_size,
        num_tokens=default.num_tokens if args.calibration_tokens is None else args.calibration_tokens,
        seed=default.seed if args.seed is None else args.seed,
        gate_weighted=default.gate_weighted if args.gate_weighted is None else args.gate_weighted,
    )
    return DraftSettings(args.method, gptq, args.calibration, args.device, args.vram_budget)
