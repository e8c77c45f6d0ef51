"""Options of how tokens are chosen, and of thoughts before an answer; and the SamplingConfig that they
describe. Chooses none."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localmoe.cli.output import note
from localmoe.core.bounded_file import read_text_bounded
from localmoe.core.config import THINKING, SamplingConfig, check_schema
from localmoe.core.errors import ConfigError

if TYPE_CHECKING:
    from localmoe.engine import Engine

_GREEDY = SamplingConfig()
_MOST_SCHEMA_BYTES = 8 << 20
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Numbers that are not given are None: the model's own may hold in their place."""
    parser.add_argument(
        "--own-sampling",
        action="store_true",
        help="choose tokens as the model's generation_config.json recommends; options that are given win",
    )
    parser.add_argument("--temperature", type=float, help=f"0 is greedy; default: {_GREEDY.temperature:g}")
    parser.add_argument("--top-p", type=float, help=f"1 is off; default: {_GREEDY.top_p:g}")
    parser.add_argument("--top-k", type=int, help=f"0 is off; default: {_GREEDY.top_k}")
    parser.add_argument("--min-p", type=float, help=f"0 is off; default: {_GREEDY.min_p:g}")
    parser.add_argument(
        "--repetition-penalty", type=float, help=f"1 is off; default: {_GREEDY.repetition_penalty:g}"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="default: another one every time")
    parser.add_argument(
        "--thinking", choices=THINKING, default="auto",
        help="whether, or how long, a reasoning model thinks before it answers, as far as its chat template "
        "lets one choose; auto: as the template has it",
    )  # fmt: skip


def add_schema_option(parser: argparse.ArgumentParser) -> None:
    """What an answer has to be."""
    parser.add_argument(
        "--json-schema", metavar="FILE", type=Path,
        help="answers are JSON of the JSON schema in this file, behind their thoughts",
    )  # fmt: skip


def json_schema(args: argparse.Namespace) -> str | None:
    """The text of the schema that is asked for, if one is.

    Raises:
        ConfigError: it cannot be read.
    """
    path: Path | None = args.json_schema
    if path is None:
        return None
    try:
        schema = read_text_bounded(path, _MOST_SCHEMA_BYTES)
        check_schema(schema)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"The schema in {path} cannot be read ({reason}): give another file.") from None
    return schema


def sampling_config(args: argparse.Namespace, own: SamplingConfig | None = None) -> SamplingConfig:
    """What the options describe; where they say nothing, `own`, or greedy.

    Raises:
        ConfigError: a value is out of range.
    """
    given = {name: value for name in _NAMES if (value := getattr(args, name)) is not None}
    return replace(own or _GREEDY, **given)


def loaded_sampling(args: argparse.Namespace, engine: Engine) -> SamplingConfig:
    """The same for a loaded model, whose own holds if that is wished for; says where it has none, and where
    its thoughts are none to choose."""
    choices = engine.info().thinking
    if args.thinking not in ("auto", *choices):
        known = f"knows {', '.join(choices)}" if choices else "leaves no choice"
        note(f"--thinking {args.thinking}: the model's chat template {known}; the nearest to it holds.")
    if not args.own_sampling:
        return sampling_config(args)
    info = engine.info()
    if info.own_sampling is None:
        note(f"{info.name} recommends no sampling: answers are as without --own-sampling.")
    return sampling_config(args, info.own_sampling)
