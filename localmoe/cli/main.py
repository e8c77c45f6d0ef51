"""Entry point of the `localmoe` command: parse, run, turn errors into one sentence and an exit code.

Exit codes: 0 done, 1 a LocalMoeError, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib import import_module

from localmoe.cli.arguments import parse_arguments
from localmoe.cli.model_files import check_no_file
from localmoe.cli.streams import OutputError, drop_stdout, sound_streams, tell
from localmoe.core.errors import LocalMoeError
from localmoe.core.hub_address import check_hub_address
from localmoe.core.teardown import silence_teardown
from localmoe.core.uncollected import uncollected
from localmoe.core.uninterrupted import INTERRUPTED, ended_at_once

_COMMANDS = {
    "hw": ("report", "run_hw"),
    "plan": ("plan", "run_plan"),
    "pull": ("pull", "run_pull"),
    "models": ("report", "run_models"),
    "rm": ("report", "run_rm"),
    "draft": ("draft", "run_draft"),
    "chat": ("chat", "run_chat"),
    "generate": ("generate", "run_generate"),
    "serve": ("serve", "run_serve"),
    "bench": ("bench", "run_bench"),
    "bench tables": ("tables", "run_tables"),
    "trace": ("trace", "run_trace"),
    "simulate": ("simulate", "run_simulate"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: that of the process, whose end this is then."""
    if argv is None:
        silence_teardown()
    try:
        with sound_streams():
            _run(parse_arguments(argv))
    except LocalMoeError as error:
        if isinstance(error, OutputError):
            drop_stdout()
        tell(f"localmoe: {error}\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout went away; there is nobody to tell
        drop_stdout()
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    check_hub_address()
    if args.command != "pull":
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a command works on what is here; nothing phones home
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # pull asks the Hub for its files and nothing else
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for model in (getattr(args, "model", None), getattr(args, "draft_model", None)):
        check_no_file(model)
    _function(args.command)(args)


def _function(command: str) -> Callable[[argparse.Namespace], None]:
    """What runs a command; imported here so that --help, usage errors and what only looks at files need
    no torch."""
    module, function = _COMMANDS[command]
    with ended_at_once(), uncollected(for_good=True):
        run: Callable[[argparse.Namespace], None] = getattr(import_module(f"localmoe.cli.{module}"), function)
    return run
