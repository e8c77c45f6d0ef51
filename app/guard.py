"""Refuses every request that does not come from a page of this server: checks Host and Origin, and tells the
browser to load nothing from elsewhere. Knows no route."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Nothing may be fetched from, sent to or framed by another origin, whatever a model or a title contains.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; media-src 'self' blob:; connect-src 'self'; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_CLOSED = ("/gradio_api/upload", "/gradio_api/proxy=")  # routes of Gradio that the page does not use


class LocalOnly:
    """ASGI middleware around everything. `port` is the one that the server is bound to."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app, self._port = app, port
        self._hosts = {f"{name}:{port}" for name in LOOPBACK} | (set(LOOPBACK) if port == 80 else set())
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with the security headers added."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal:
            await PlainTextResponse(refusal, status_code=403)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> str:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        modes = [value for name, value in headers if name == b"sec-fetch-mode"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return (
                "This server answers to its own address on this computer only, "
                f"http://127.0.0.1:{self._port}: a tunnel to it needs the same port at both ends."
            )
        if any(origin not in self._origins for origin in origins):
            return "This server answers to its own page only."
        if b"cross-site" in sites and modes != [b"navigate"]:
            return "This server answers to its own page only."
        if scope["path"].startswith(_CLOSED):
            return "This server takes no files."
        return ""


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
        await send(message)

    return wrapped
