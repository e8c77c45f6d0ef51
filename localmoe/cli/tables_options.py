"""The options of `localmoe bench tables`, and which of them make sense together. Runs nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from localmoe.cli.option_types import at_least, checked
from localmoe.core.errors import ConfigError
from localmoe.core.synthetic import SyntheticSettings, parse_routing, parse_share
from localmoe.core.units import parse_speed

COMMAND = "bench tables"  # two words, so no choice of the parser of the others
EMULATED_LINK = 100e6  # bytes a second, of the embedded model on a CPU


def is_tables(words: Sequence[str]) -> bool:
    """Whether a command line is this command's."""
    return list(words[:2]) == COMMAND.split()


def tables_parser() -> argparse.ArgumentParser:
    """The parser of what follows the command."""
    text = "measure the papers' tables on this machine, or write the page that shows them"
    parser = argparse.ArgumentParser(prog=f"localmoe {COMMAND}", description=text)
    parser.add_argument(
        "results", type=Path, nargs="*", metavar="RESULTS.json", help="with --render: files to read"
    )
    parser.add_argument("--render", type=Path, metavar="PAGE.md", help="write the page and its charts")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep results here, and go on with those that are there"
    )
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--tables", type=checked(_names), metavar="A,B", help="e.g. 3,fig6; an unknown one lists them"
    )
    what.add_argument(
        "--datasets", type=checked(_names), metavar="A,B", help="e.g. gsm8k,c4; another lists them"
    )
    what.add_argument(
        "--limit", type=checked(at_least(1)), default=4, metavar="N", help="prompts a dataset; default: 4"
    )
    what.add_argument("--max-new-tokens", type=checked(at_least(4)), default=32, metavar="N")
    what.add_argument("--draft-length", type=checked(at_least(1)), default=4, metavar="N", help="where fixed")
    _add_subjects(parser)
    parser.set_defaults(command=COMMAND, check=partial(_check, parser))
    return parser


def _add_subjects(parser: argparse.ArgumentParser) -> None:
    on = parser.add_argument_group("on what (default: the embedded model on every device that is here)")
    on.add_argument("--model", metavar="MODEL", help="another model, as of the other commands")
    on.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    on.add_argument(
        "--emulated-link", type=checked(parse_speed), metavar="SPEED", help="on a CPU; default: 100MB/s"
    )
    on.add_argument("--shape", action="append", metavar="NAME", help="random weights of a shape; repeat")
    on.add_argument("--card", metavar="NAME", help="predict the shapes on this card instead of running them")
    on.add_argument("--prompt-tokens", type=checked(at_least(1)), default=64, metavar="N", help="of shapes")
    on.add_argument(
        "--routing", type=checked(parse_routing), metavar="uniform|sticky:P|trace:FILE", help="of shapes"
    )
    for name, text in (
        ("--synthetic-acceptance", "probability that a drafted token is accepted; default: 0.9"),
        ("--synthetic-match", "probability that the draft routes as the target does; default: 0.909"),
    ):
        on.add_argument(name, type=checked(parse_share), metavar="SHARE", help=text)


def _names(text: str) -> tuple[str, ...]:
    """ "A,B".

    Raises:
        ConfigError: it names nothing, as a variable of the shell that is empty: that is not all there is.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ConfigError(f"'{text}' names nothing: leave the option out for all, or give A,B.")
    return names


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what makes no sense together, and put the settings of the simulation into `args.synthetic`."""
    if args.render is None and args.results:
        parser.error("files of results are read with --render PAGE.md only; --json FILE goes on with one")
    if args.render is not None and not args.results:
        parser.error("--render needs files of results: localmoe bench tables --render PAGE.md RESULTS.json")
    if args.render is not None and args.json is not None:
        parser.error("--render runs nothing: leave --json out")
    if args.model is not None and args.shape is not None:
        parser.error("give either --model MODEL or --shape NAME")
    if args.card is not None and args.shape is None:
        parser.error("--card predicts shapes: add --shape NAME")
    shaped = (args.routing, args.synthetic_acceptance, args.synthetic_match)
    if args.shape is None and any(value is not None for value in shaped):
        parser.error("--routing, --synthetic-acceptance and --synthetic-match make sense with --shape only")
    try:
        args.synthetic = SyntheticSettings(
            args.routing or parse_routing("sticky:0.5"),
            0.9 if args.synthetic_acceptance is None else args.synthetic_acceptance,
            0.909 if args.synthetic_match is None else args.synthetic_match,
        )
    except ConfigError as error:
        parser.error(str(error))
