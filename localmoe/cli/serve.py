"""`localmoe serve`: OpenAI's and Anthropic's APIs on a loaded model. Answers nothing itself."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
from dataclasses import replace
from types import FrameType

from localmoe.cli.load_options import engine_config
from localmoe.cli.output import ProgressBars, note
from localmoe.cli.sampling_options import loaded_sampling, sampling_config
from localmoe.core.errors import ConfigError
from localmoe.engine import Engine
from localmoe.server.address import base_url, bind, is_loopback
from localmoe.server.settings import ServerSettings

_KEY_VARIABLE = "LOCALMOE_API_KEY"


def run_serve(args: argparse.Namespace) -> None:
    """Bind, load, serve until Ctrl+C, SIGTERM or the end of the terminal.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    for package, version in (("fastapi", ">=0.115,<1"), ("uvicorn", ">=0.30,<1")):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"The API needs {package}, which is not here: pip install '{package}{version}'."
            )
    from localmoe.server.serving import check_reach, serve

    key = os.environ.get(_KEY_VARIABLE) if args.api_key is None else args.api_key
    settings = ServerSettings(key, tuple(args.cors), args.max_waiting, sampling_config(args), args.thinking)
    config = engine_config(args, policy=args.policy)
    with bind(args.host, args.port) as sock:  # before the load, which may take minutes
        check_reach(sock, settings)
        signal.signal(signal.SIGTERM, _end)
        _end_with_terminal()
        with ProgressBars() as progress:
            engine = Engine.load(args.model, config, progress=progress)
        with engine:
            settings = replace(settings, sampling=loaded_sampling(args, engine))
            try:
                serve(engine, sock, settings, lambda: _announce(engine, sock, _shown_key(args, key)))
            except KeyboardInterrupt:
                note("localmoe: ended.")


def _shown_key(args: argparse.Namespace, key: str | None) -> str:
    """How an example names the key without telling it."""
    return "" if key is None else f"${_KEY_VARIABLE}" if args.api_key is None else "YOUR_KEY"


def _announce(engine: Engine, sock: socket.socket, shown_key: str) -> None:
    url = base_url(sock)
    others = "" if is_loopback(sock) else " (other computers: this one's address in its place)"
    note(f"localmoe serves {engine.info().name} at {url}/v1{others}; Ctrl+C ends it. Try:")
    key = f' -H "Authorization: Bearer {shown_key}"' if shown_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    note(f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)  # so that everything open is closed in order


def _end_with_terminal() -> None:
    """A closed terminal is a wish for the same end, but not where nohup or the like has it ignored."""
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        signal.signal(hangup, lambda number, frame: signal.raise_signal(signal.SIGTERM))
