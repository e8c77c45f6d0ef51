"""Entry point of the `localmoe` command: parse, run, turn errors into one sentence and an exit code.

Exit codes: 0 done, 1 a LocalMoeError, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from localmoe.cli.arguments import parse_arguments
from localmoe.core.errors import LocalMoeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parse_arguments(argv)
    if args.command != "pull":
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a command works on what is here; nothing phones home
    try:
        _run(args.command)(args)
    except LocalMoeError as error:
        sys.stderr.write(f"localmoe: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout went away; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _run(command: str) -> Callable[[argparse.Namespace], None]:
    """The function of a command; imported here so that --help and usage errors need no torch."""
    import transformers

    from localmoe.cli import bench, generate, pull, report, serve, simulate, tables, trace

    transformers.logging.set_verbosity_error()
    return {
        "hw": report.run_hw,
        "plan": report.run_plan,
        "pull": pull.run_pull,
        "models": report.run_models,
        "rm": report.run_rm,
        "draft": report.run_draft,
        "generate": generate.run_generate,
        "serve": serve.run_serve,
        "bench": bench.run_bench,
        "bench-tables": tables.run_tables,
        "trace": trace.run_trace,
        "simulate": simulate.run_simulate,
    }[command]
