"""The address of the server: binding it, refusing others, and saying where it is. Needs no Gradio, so that a
start on a taken port ends at once."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from app.files import write_json
from localmoe import __version__
from localmoe.core.errors import LocalMoeError
from localmoe.hub.process_marks import is_running, own_mark
from localmoe.server.address import bind as bind_any

PORT_TAKEN = 98  # exit code: the starter then tries the next port
HOSTS = ("127.0.0.1", "localhost", "::1")


class AddressRefusedError(LocalMoeError):
    """The address is not one of this computer alone."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        AddressRefusedError: other computers could reach it.
        AddressUnusableError: it is no port.
        PortTakenError: another program listens there.
    """
    if host not in HOSTS:
        raise AddressRefusedError(
            f"Host {host} would let other computers in, which this version does not do: use 127.0.0.1."
        )
    return bind_any(host, port)


@contextlib.contextmanager
def state_file(home: Path, host: str, port: int) -> Iterator[None]:
    """Says in LOCALMOE_HOME/run/server.json where the server is, for as long as it runs."""
    path = _state_path(home)
    state = {
        "pid": os.getpid(), "mark": own_mark(), "host": host, "port": port, "version": __version__,
        "started": time.time(),
    }  # fmt: skip
    write_json(path, state)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # who reads it looks whether that process runs
            path.unlink()


def running_page(home: Path) -> str | None:
    """Where a server that runs says it is, though it may not answer yet; None where none says so."""
    try:
        state = json.loads(_state_path(home).read_text(encoding="utf-8"))
        pid, start_ms = (int(part) for part in state["mark"].split("-"))
        return page_url(str(state["host"]), int(state["port"])) if is_running(pid, start_ms) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _state_path(home: Path) -> Path:
    return home / "run" / "server.json"


def page_url(host: str, port: int) -> str:
    """Where the page is."""
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
