"""Refuses requests by their headers, before a route sees them: foreign names, foreign pages, a wrong key.
Knows no route but the one that is always open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from localmoe.server.errors import ApiError, error_response
from localmoe.server.settings import is_origin

OPEN_PATH = "/health"


class AddressGuard:
    """ASGI middleware. A page of another origin may not ask, nor one whose own name leads here (DNS
    rebinding)."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, origins: tuple[str, ...]) -> None:
        """hosts: allowed Host headers; None: any, as where a key is demanded. origins: allowed pages; "*":
        all."""
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        refusal = self._refusal(scope) if scope["type"] == "http" else ""
        if refusal:
            await error_response(ApiError(403, refusal, code="forbidden"), scope["path"])(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        hosts = [host.lower() for host in _headers(scope, b"host")]
        if self._hosts is not None and (len(hosts) != 1 or hosts[0] not in self._hosts):
            asked = f"'{hosts[0]}'" if len(hosts) == 1 else "none or several"
            return (
                f"This server answers to the names of this computer only, such as {min(self._hosts)}, and "
                f"this request has {asked}: where it comes by a tunnel, give that the same port at both ends."
            )
        for origin in _headers(scope, b"origin"):
            if "*" not in self._origins and origin not in self._origins:
                return f"Pages of '{origin}' may not ask: start this server with {_letting_in(origin)}."
        return ""


class KeyGuard:
    """ASGI middleware: a request has to bring the key, as OpenAI's clients do or as Anthropic's, or it is
    refused."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if (
            scope["type"] != "http"
            or scope["path"] == OPEN_PATH
            or self._knows(_headers(scope, b"authorization"), _headers(scope, b"x-api-key"))
        ):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401, "The API key is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            code="invalid_api_key",
        )  # fmt: skip
        await error_response(refusal, scope["path"])(scope, receive, send)

    def _knows(self, bearers: Iterable[str], keys: Sequence[str]) -> bool:
        """Takes the same time for every wrong key: digests of the same length are compared. Of two kinds one
        may be another server's."""
        words = [value.split(maxsplit=1) for value in bearers]
        given = []
        if len(words) == 1 and len(words[0]) == 2 and words[0][0].lower() == "bearer":
            given.append(words[0][1])
        if len(keys) == 1:
            given.append(keys[0])
        digests = [hashlib.sha256(key.strip().encode("latin-1")).digest() for key in given]
        return any(hmac.compare_digest(digest, self._digest) for digest in digests)


def _letting_in(origin: str) -> str:
    """The options that do so; what no option names, as a page's file has no address, any page may be."""
    if is_origin(origin):
        return f"--cors {origin} if they should"
    return "--cors '*' and an --api-key if they should, or give them an address such as http://localhost:3000"


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
