"""The command line's grammar: subcommands, options, and how their texts become values. Runs nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from localmoe import __version__
from localmoe.cli.draft_options import add_draft_options
from localmoe.cli.load_options import DEFAULTS, add_load_options, add_target_options, check_load
from localmoe.cli.option_types import checked as _checked
from localmoe.cli.option_types import draft_lengths as _draft_lengths
from localmoe.cli.sampling_options import add_sampling_options, add_schema_option
from localmoe.cli.serve_options import add_serve_options
from localmoe.cli.simulate_options import add_simulate_options
from localmoe.cli.tables_options import is_tables, tables_parser
from localmoe.core.errors import ConfigError
from localmoe.core.synthetic import SyntheticSettings, parse_routing, parse_share


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's name and its options, which make sense together; bad usage ends the program (exit code
    2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = tables_parser().parse_args(words[2:]) if is_tables(words) else build_parser().parse_args(words)
    if hasattr(args, "check"):
        args.check(args)
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of `localmoe`."""
    parser = argparse.ArgumentParser(
        prog="localmoe", description="Run Mixture-of-Experts models larger than the GPU's memory, exactly."
    )
    parser.add_argument("--version", action="version", version=f"localmoe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add(commands, "hw", "what was detected and measured")
    plan = _add(commands, "plan", "what a model needs and how the memory would be divided")
    _add_model(plan)
    add_load_options(plan)
    pull = _add(commands, "pull", "download a model from the Hugging Face Hub, or go on with it", json=False)
    _add_pull_options(pull)
    _add(commands, "models", "models on this machine")
    remove = _add(commands, "rm", "delete a downloaded model and what was made of it", json=False)
    _add_remove_options(remove)
    draft = _add(commands, "draft", "build the low-bit draft of a model", json=False)
    _add_model(draft)
    add_draft_options(draft)
    chat = _add(commands, "chat", "a conversation in the terminal", json=False)
    _add_model(chat)
    _add_chat_options(chat)
    generate = _add(commands, "generate", "answer prompts")
    _add_model(generate)
    _add_generate_options(generate)
    serve = _add(
        commands, "serve", "answer programs: OpenAI's and Anthropic's APIs without the page", json=False
    )
    _add_model(serve)
    add_serve_options(serve)
    _add_answer_options(serve)
    bench = _add(commands, "bench", "measure policies and draft lengths; bench tables: the papers' tables")
    _add_bench_options(bench)
    trace = _add(commands, "trace", "record a model's routing, for bench --routing trace:FILE")
    _add_model(trace)
    _add_trace_options(trace)
    simulate = _add(commands, "simulate", "predict policies on a machine, from simulated or recorded routing")
    add_simulate_options(simulate)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, *, json: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON and nothing else on stdout")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a model folder, a Hub repo id on this machine, or demo"
    )


def _add_remove_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--made",
        action="store_true",
        help="delete what was made of it alone, its drafts and the file of its experts on the disk; also of "
        "a folder's model, and of one that is gone",
    )
    what.add_argument("--experts-file", action="store_true", help="of that, the file of its experts alone")


def _add_pull_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="REPO", help="a Hub repo id, e.g. Qwen/Qwen1.5-MoE-A2.7B-Chat")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--revision", metavar="R", help="a branch, tag or commit; default: the main branch")
    what.add_argument("--discard", action="store_true", help="delete what an unfinished download left")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="say what it needs and whether that is here, and download nothing; exit code 1 if it is not",
    )
    parser.set_defaults(check=partial(_check_pull, parser))


def _check_pull(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.plan and args.discard:
        parser.error("--plan and --discard exclude each other: leave one out")


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="of an answer; default: what the context has room for"
    )
    _add_answer_options(parser)


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='lines with "id" and "prompt"')
    parser.add_argument(
        "--image", action="append", default=[], type=Path, metavar="FILE",
        help="a picture before each prompt, for a model that reads some; may be given several times",
    )  # fmt: skip
    parser.add_argument("--raw", action="store_true", help="do not wrap the prompt in the chat template")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="of an answer; default: %(default)s"
    )
    parser.add_argument(
        "--draft-only", action="store_true", help="approximate: the draft answers alone, nothing is verified"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE.json", help="write when every step ran, for ui.perfetto.dev"
    )
    add_schema_option(parser)
    _add_answer_options(parser)


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        default=DEFAULTS.policy,
        metavar="NAME",
        help="what decides which experts are fetched; an unknown one lists them; default: %(default)s",
    )
    add_sampling_options(parser)
    add_load_options(parser)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="default: 60 prompts that come with localmoe"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use N prompts only")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="of an answer; default: %(default)s"
    )


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    _add_prompt_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="where to put the trace")
    add_target_options(parser)
    # the target alone is recorded
    parser.set_defaults(
        draft_length=0, draft=None, drafter="auto", draft_model=None, emulated_link=None, lanes="vram+link",
        strict=True, cpu_threads=None, draft_bits=None, prompt_cache=0,
    )  # fmt: skip


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as of the other commands")
    _add_prompt_options(parser)
    parser.add_argument("--policy", action="append", metavar="NAME", help="repeat to compare; default: all")
    parser.add_argument(
        "--draft-lengths",
        type=_checked(_draft_lengths),
        metavar="A,B,...",
        help="default: 0,4,auto; with --draft-length N that in the place of 4",
    )
    add_load_options(parser)
    shape = parser.add_argument_group("in place of MODEL: random weights of a model's shape, no file")
    shape.add_argument("--shape", metavar="NAME", help="e.g. qwen1.5-moe-a2.7b; an unknown one lists them")
    shape.add_argument("--prompt-tokens", type=int, metavar="N", help="random tokens a prompt; default: 64")
    shape.add_argument(
        "--routing",
        type=_checked(parse_routing),
        metavar="uniform|sticky:P|trace:FILE",
        help="which experts the target uses; default: what the random weights choose",
    )
    for name, text in (
        ("--synthetic-acceptance", "probability that a drafted token is accepted"),
        ("--synthetic-match", "probability that the draft routes a (token, layer) as the target does"),
    ):
        shape.add_argument(name, type=_checked(parse_share), metavar="SHARE", help=text)
    parser.set_defaults(check=partial(_check_bench, parser))


def _check_bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what makes no sense together, and put the settings of the simulation into `args.synthetic`."""
    check_load(parser, args)
    if (args.model is None) == (args.shape is None):
        parser.error("give either a MODEL or --shape NAME")
    for_shapes = ("prompt_tokens", "routing", "synthetic_acceptance", "synthetic_match")
    for_models = ("prompts", "draft", "draft_model")
    wrong = for_shapes if args.shape is None else for_models
    for name in wrong:
        if getattr(args, name) is not None:
            needed = "--shape NAME" if args.shape is None else "a MODEL"
            parser.error(f"--{name.replace('_', '-')} makes sense with {needed} only")
    if args.draft_lengths is None:  # --draft-length 0 loads no draft
        args.draft_lengths = (0, 4 if args.draft_length in (0, "auto") else args.draft_length, "auto")
    args.synthetic = None
    if args.shape is not None:
        if args.prompt_tokens is not None and args.prompt_tokens < 1:
            parser.error(f"--prompt-tokens {args.prompt_tokens} is out of range: use at least 1")
        try:
            args.synthetic = SyntheticSettings(args.routing, args.synthetic_acceptance, args.synthetic_match)
        except ConfigError as error:
            parser.error(str(error))
