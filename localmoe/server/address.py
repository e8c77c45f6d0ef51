"""Binds the server's address and says who can reach it. Needs the standard library alone, so that a taken
port ends a start before anything is loaded."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys

from localmoe.core.errors import LocalMoeError


class PortTakenError(LocalMoeError):
    """Another program listens there."""


class AddressUnusableError(LocalMoeError):
    """It is no address of this computer, or no port."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, which does not listen yet; port 0 takes a free one.

    Raises:
        PortTakenError: another program listens there.
        AddressUnusableError: it is no address of this computer, or no port.
    """
    if not 0 <= port <= 65535:
        raise AddressUnusableError(f"Port {port} is out of range: use 1 to 65535, or 0 for a free one.")
    try:
        found = socket.getaddrinfo(
            host, port, socket.AF_INET if host == "localhost" else 0, socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        raise AddressUnusableError(
            f"Host '{host}' is no address: use 127.0.0.1 for this computer alone, or 0.0.0.0 for all."
        ) from None
    family, _, _, _, address = found[0]
    # asyncio sends small pieces at once only where the protocol is named; else they wait for up to 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if sys.platform != "win32":  # on Windows it would let two programs share the port
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise port_taken(port) from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise AddressUnusableError(f"The address {host} cannot be used: {reason}.") from None
    return sock


def port_taken(port: int) -> PortTakenError:
    """The refusal of a port."""
    return PortTakenError(f"Port {port} is taken or not allowed: choose another with --port.")


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this computer reaches a bound socket."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def own_hosts(host: str, port: int) -> frozenset[str]:
    """Values of the Host header by which programs of this computer name a server on its loopback address."""
    names = {"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host.lower()}
    return frozenset({f"{name}:{port}" for name in names} | (names if port == 80 else set()))


def base_url(sock: socket.socket) -> str:
    """Where programs of this computer find a bound socket's server."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
