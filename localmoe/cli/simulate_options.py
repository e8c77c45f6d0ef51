"""The options of `localmoe simulate`, and which of them make sense together. Runs nothing."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from localmoe.cli.option_types import at_least, checked, fixed_draft_lengths
from localmoe.core.config import USUAL_CONTEXT
from localmoe.core.errors import ConfigError
from localmoe.core.synthetic import RoutingSpec, SyntheticSettings, parse_routing, parse_share
from localmoe.core.units import parse_bytes, parse_speed

DRAFTERS = ("self", "prompt-lookup")


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Routing, model, machine, and what is run on them."""
    _add_routing(parser)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", metavar="NAME", help="a known model's shape; an unknown one lists them")
    model.add_argument("--model", metavar="MODEL", help="as of the other commands; only its headers are read")
    machine = parser.add_argument_group("the machine: a card, or slots and speeds (which change a card's)")
    machine.add_argument("--card", metavar="NAME", help="e.g. rtx-4090; an unknown one lists them")
    machine.add_argument("--slots", type=checked(at_least(1)), metavar="N", help="experts in device memory")
    machine.add_argument("--link", type=checked(parse_speed), metavar="SPEED", help="e.g. 25GB/s")
    machine.add_argument(
        "--memory", type=checked(parse_speed), metavar="SPEED", help="device memory, e.g. 1TB/s"
    )
    machine.add_argument(
        "--cpu", type=checked(parse_speed), metavar="SPEED",
        help="at which the CPU computes missing experts, e.g. 60GB/s; default: it does not",
    )  # fmt: skip
    machine.add_argument(
        "--disk", type=checked(parse_speed), metavar="SPEED",
        help="from which experts come to the CPU, e.g. 3GB/s; default: all lie in RAM",
    )  # fmt: skip
    machine.add_argument(
        "--ram-budget", type=checked(parse_bytes), metavar="SIZE",
        help="RAM for some of the experts beside such a disk, e.g. 20GiB",
    )  # fmt: skip
    machine.add_argument(
        "--context", type=checked(at_least(16)), metavar="N",
        help=f"tokens of prompt and answer together; default: {USUAL_CONTEXT}, or the model's own limit if "
        "that is less",
    )  # fmt: skip
    machine.add_argument(
        "--layer-by-layer", action="store_true",
        help="as on a CPU, not in whole passes; with --disk, the CPU computes all and there is no card",
    )  # fmt: skip
    run = parser.add_argument_group("what runs on it")
    run.add_argument("--policy", action="append", metavar="NAME", help="repeat to compare; default: all")
    run.add_argument(
        "--draft-lengths",
        type=checked(fixed_draft_lengths),
        default=(0, 4),
        metavar="A,B",
        help="default: 0,4",
    )
    run.add_argument("--drafter", choices=DRAFTERS, default="self", help="prompt-lookup routes no experts")
    for name, least, default, text in (
        ("--answers", 1, 4, "how many"),
        ("--prompt-tokens", 1, 64, "of each answer's prompt"),
        ("--max-new-tokens", 2, 128, "of each answer"),
    ):
        run.add_argument(
            name,
            type=checked(at_least(least)),
            default=default,
            metavar="N",
            help=f"{text}; default: {default}",
        )
    parser.set_defaults(check=partial(_check, parser))


def _add_routing(parser: argparse.ArgumentParser) -> None:
    routing = parser.add_mutually_exclusive_group(required=True)
    routing.add_argument(
        "--trace", type=Path, metavar="FILE.npz", help="routing that localmoe trace recorded"
    )
    routing.add_argument("--routing", type=checked(parse_routing), metavar="uniform|sticky:P")
    shares = parser.add_argument_group("how well drafts and guesses agree (shares from 0 to 1)")
    for name, default, text in (
        ("--acceptance", 0.9, "probability that a drafted token is accepted"),
        ("--match", 0.9, "probability that the draft routes a (token, layer) as the target does"),
        ("--gate-accuracy", 0.85, "the same of the next layer's gate, for policies that guess by it"),
    ):
        shares.add_argument(
            name, type=checked(parse_share), default=default, metavar="P", help=f"{text}; default: {default}"
        )
    shares.add_argument("--seed", type=int, default=0, metavar="N")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a machine that is not whole, and put the settings of the simulation into `args.synthetic`."""
    of_card = (args.card, args.slots, args.link, args.memory)
    if (args.disk is None) != (args.ram_budget is None):
        parser.error("--disk and --ram-budget go together: give both, or neither")
    if args.disk is not None and args.cpu is None:
        parser.error("experts on the disk come to the CPU: give --cpu SPEED too")
    if args.disk is not None and args.layer_by_layer:
        if of_card != (None,) * len(of_card):
            parser.error(
                "with --disk and --layer-by-layer there is no card: leave --card, --slots, --link and "
                "--memory out, or --layer-by-layer"
            )
    elif args.card is None and None in (args.slots, args.link, args.memory):
        parser.error("give either --card NAME, or --slots N, --link SPEED and --memory SPEED")
    elif args.cpu is not None and args.layer_by_layer:
        parser.error("--cpu is of whole passes, or goes with --disk: leave --layer-by-layer out")
    routing = args.routing or RoutingSpec("trace", path=args.trace)
    try:
        args.synthetic = SyntheticSettings(routing, args.acceptance, args.match, args.seed)
    except ConfigError as error:
        parser.error(str(error))
