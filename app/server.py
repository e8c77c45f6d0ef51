"""The web server: answers /health at once and mounts the page behind the guard. Loads no model itself."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount

from app.address import page_url
from app.chat_routes import add_chat_routes
from app.first_script import FirstScript
from app.guard import LocalOnly
from app.live_routes import add_live_routes
from app.models.service import ModelsService
from app.now import NowView
from app.now_routes import add_now_routes
from app.page import build_page
from app.picture_routes import add_picture_routes
from app.service import ChatService
from app.theme import FAVICON, first_script, make_theme, page_css, page_head
from localmoe import __version__
from localmoe.server.out_of_files import BACKLOG
from localmoe.server.quiet_end import say_less

_QUEUE_REST_S = 60.0
_KEEP_ALIVE_S = 120  # longer than a page is quiet: a connection that closes as it is used loses the request


def make_app(service: ChatService, models: ModelsService, port: int) -> FastAPI:
    """The guarded application. Built inside an event loop: outside one Gradio makes some and leaves them."""
    return asyncio.run(_make_app(service, models, port))


async def _make_app(service: ChatService, models: ModelsService, port: int) -> FastAPI:
    app = FastAPI(title="localmoe", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, str]:
        status = service.holder.status()
        return {"app": "localmoe", "version": __version__, "status": status.phase, "model": status.model}

    now = NowView(service)
    add_now_routes(app, service, now)
    add_live_routes(app, service)
    add_chat_routes(app, service)
    add_picture_routes(app, service)
    page = build_page(service, models, now)
    gr.mount_gradio_app(
        app, page, path="/", ssr_mode=False, run_history=False, footer_links=[],
        allowed_paths=[],
        theme=make_theme(), css=page_css(), head=page_head(), enable_monitoring=False, mcp_server=False,
        pwa=False,
        show_error=False, app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
        favicon_path=str(FAVICON),
    )  # fmt: skip
    let_queue_rest(page)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_middleware(FirstScript, script=first_script())
    app.add_middleware(LocalOnly, port=port)
    return app


async def _gone(_: Request, error: Exception) -> Response:
    """A page that was closed while it sent a picture or a chat is no fault."""
    return Response(status_code=400)  # nobody reads it


def let_queue_rest(page: gr.Blocks) -> None:
    """Gradio's queue looks a thousand times a second for events that wait in it, and a hundred times for
    their progress, in the process that writes answers. No listener of the page waits in it, so it may look
    seldom."""
    queued = [listener.name for listener in page.fns.values() if listener.queue]
    assert not queued, f"these listeners would wait for Gradio's queue: {queued}"
    page._queue.sleep_when_free = page._queue.progress_update_sleep_when_free = _QUEUE_REST_S


class PageServer(uvicorn.Server):
    """uvicorn, telling when it answers, and ending the streams that open pages hold before it shuts down."""

    def __init__(self, app: FastAPI, on_started: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, server_header=False,
                timeout_graceful_shutdown=1, timeout_keep_alive=_KEEP_ALIVE_S, backlog=BACKLOG,
            )
        )  # fmt: skip
        say_less()
        self._on_started = on_started
        self._mounted = [route.app for route in app.routes if isinstance(route, Mount)]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for mounted in self._mounted:
            if isinstance(mounted, gr.routes.App):
                mounted.stop_event.set()
        await super().shutdown(sockets)


def serve(
    service: ChatService,
    models: ModelsService,
    sock: socket.socket,
    host: str,
    *,
    open_browser: bool,
) -> None:
    """Run until the process is told to end; the model loads meanwhile."""
    port = int(sock.getsockname()[1])
    url = page_url(host, port)

    def on_started() -> None:
        logging.getLogger("app").info("localmoe %s answers at %s", __version__, url)
        print(f"localmoe is ready at {url} (Ctrl+C ends it)", file=sys.stderr, flush=True)
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    server = PageServer(make_app(service, models, port), on_started)
    service.logs.attach()  # uvicorn has arranged its own loggers by now
    service.start()
    models.start()
    try:
        server.run(sockets=[sock])
    finally:
        models.close()
        service.close()
