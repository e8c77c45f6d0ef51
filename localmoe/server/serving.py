"""Runs the server on a bound socket until the process is told to end. Loads no model."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError
from localmoe.core.threads import begin_thread
from localmoe.engine import Engine
from localmoe.server.address import is_loopback, own_hosts, port_taken
from localmoe.server.desk import AnswerDesk
from localmoe.server.out_of_files import BACKLOG
from localmoe.server.quiet_end import say_less
from localmoe.server.routes import ServedModel, make_app
from localmoe.server.settings import ServerSettings

_GRACE_S = 2  # for answers under way to say that the server ends
_KEEP_ALIVE_S = 120  # longer than clients keep a connection: one that closes as it is used loses the request


class ApiServer(uvicorn.Server):
    """uvicorn, telling when it answers, and ending answers before it waits for their connections."""

    def __init__(self, app: FastAPI, desk: AnswerDesk, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, server_header=False, lifespan="off",
                timeout_graceful_shutdown=_GRACE_S, timeout_keep_alive=_KEEP_ALIVE_S, backlog=BACKLOG,
            )
        )  # fmt: skip
        say_less()
        self._desk, self._on_started = desk, on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._desk.close()
        await super().shutdown(sockets)


def check_reach(sock: socket.socket, settings: ServerSettings) -> None:
    """Other computers need a key.

    Raises:
        ConfigError: they could reach the server without one.
    """
    if settings.api_key is None and not is_loopback(sock):
        host = sock.getsockname()[0]
        raise ConfigError(
            f"Other computers reach {host}: give an --api-key or set LOCALMOE_API_KEY, or use 127.0.0.1."
        )


def make_server(
    engine: Engine, sock: socket.socket, settings: ServerSettings, on_started: Callable[[], None]
) -> tuple[ApiServer, AnswerDesk]:
    """A server for a bound socket, and the desk that has to be closed after it.

    Raises:
        ConfigError: see `check_reach`.
    """
    check_reach(sock, settings)
    info = engine.info()
    host, port = sock.getsockname()[:2]
    engine.captures.begin(settings.sampling)
    with suppress(RuntimeError):  # without a thread the first request with tools does it
        begin_thread("grammars", engine.prepare_grammars)
    desk = AnswerDesk(engine, settings.max_waiting, engine.captures.begin)
    model = ServedModel(info.name, info.context, int(time.time()))
    hosts = own_hosts(host, port) if is_loopback(sock) else None

    def count(request: GenerationRequest) -> int:
        return len(engine.encode(request, sys.maxsize))  # also what the context has no room for

    return ApiServer(make_app(desk, model, settings, hosts, count), desk, on_started), desk


def serve(
    engine: Engine, sock: socket.socket, settings: ServerSettings, on_started: Callable[[], None]
) -> None:
    """Answer until a signal ends the process; then end the answer under way.

    Raises:
        ConfigError: see `check_reach`.
        PortTakenError: another program was faster to listen on the port.
        KeyboardInterrupt: the user ended it.
    """
    try:
        sock.listen(BACKLOG)
    except OSError:
        raise port_taken(sock.getsockname()[1]) from None
    server, desk = make_server(engine, sock, settings, on_started)
    try:
        server.run(sockets=[sock])
    finally:
        desk.close()
        desk.join()
