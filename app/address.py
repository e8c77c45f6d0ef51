"""The address of the server: binding it, refusing others, and saying where it is. Needs no Gradio, so that a
start on a taken port ends at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from app.files import write_json
from localmoe import __version__
from localmoe.core.errors import LocalMoeError

PORT_TAKEN = 98  # exit code: the starter then tries the next port
HOSTS = ("127.0.0.1", "localhost", "::1")


class AddressRefusedError(LocalMoeError):
    """The address is none, or not one of this computer alone."""


class PortTakenError(LocalMoeError):
    """Another program listens there."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        AddressRefusedError: other computers could reach it.
        PortTakenError: another program listens there.
    """
    if not 0 <= port <= 65535:
        raise AddressRefusedError(f"Port {port} is out of range: use 1 to 65535, or 0 for a free one.")
    if host not in HOSTS:
        raise AddressRefusedError(
            f"Host {host} would let other computers in, which this version does not do: use 127.0.0.1."
        )
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if sys.platform != "win32":  # on Windows it would let two programs share the port
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1" if host == "localhost" else host, port))
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PortTakenError(
                f"Port {port} is taken or not allowed: choose another with --port."
            ) from None
        raise AddressRefusedError(f"The address {host} cannot be used: {error.strerror}.") from None
    return sock


@contextlib.contextmanager
def state_file(home: Path, host: str, port: int) -> Iterator[None]:
    """Says in LOCALMOE_HOME/run/server.json where the server is, for as long as it runs."""
    path = home / "run" / "server.json"
    state = {"pid": os.getpid(), "host": host, "port": port, "version": __version__, "started": time.time()}
    write_json(path, state)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def page_url(host: str, port: int) -> str:
    """Where the page is."""
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
