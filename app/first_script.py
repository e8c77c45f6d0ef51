"""Puts a script into the page's document before all others: what Gradio is given for the head runs after its
own. Knows no route but the page's.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEAD = b"<head>"


class FirstScript:
    """ASGI middleware around the page."""

    def __init__(self, app: ASGIApp, script: str) -> None:
        self._app = app
        self._tag = f"<script>{script}</script>".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; the document gets the script behind its opening head tag."""
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("GET", "/"):
            await self._app(scope, receive, send)
            return
        plain = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        await self._app({**scope, "headers": plain}, receive, self._adding(send))

    def _adding(self, send: Send) -> Send:
        start: Message = {}
        document = bytearray()

        async def collect(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = {"headers": [], **message}
                return
            if message["type"] != "http.response.body":
                await send(message)
                return
            document.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            body = bytes(document).replace(_HEAD, _HEAD + self._tag, 1)
            MutableHeaders(scope=start)["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": body})

        return collect
