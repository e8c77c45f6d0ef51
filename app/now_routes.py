"""The addresses that an open page asks while it is in sight: what has moved, and how many tokens are in its
box to write in. Behind the guard like every other route; changes nothing."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.now import Asked, NowView
from app.requests import MAX_MESSAGE
from app.service import ChatService
from app.texts import texts_for
from app.typed import Typed, count_typed

_FRESH = {"Cache-Control": "no-store"}
_MAX_BYTES = 4 * MAX_MESSAGE  # of UTF-8
_MAX_DIGITS = 9


def add_now_routes(app: FastAPI, service: ChatService, now: NowView) -> None:
    """Before the page is mounted, which takes every other address. These are Starlette's own routes, and the
    first one uses no thread: asked five times a second, what FastAPI and a thread add would be half of the
    cost."""

    async def tell(request: Request) -> Response:
        query = request.query_params
        typed = query.get("typed", "0")
        if not typed.isdecimal() or len(typed) > _MAX_DIGITS:
            return PlainTextResponse("The number of typed tokens is no number.", status_code=400)
        asked = Asked(
            query.get("chat", ""), texts_for(query.get("language")).language, query.get("turn", ""),
            query.get("panel", ""), query.get("meter", ""), Typed(int(typed), query.get("about") == "1"),
        )  # fmt: skip
        return JSONResponse(now.tell(asked), headers=_FRESH)

    async def count(request: Request) -> Response:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > _MAX_BYTES:
                return PlainTextResponse("The text is too long to be counted.", status_code=413)
        text = b"".join(parts).decode("utf-8", "replace")
        typed = await run_in_threadpool(count_typed, service.holder, text)
        return JSONResponse({"tokens": typed.tokens, "about": typed.about}, headers=_FRESH)

    app.router.routes.append(Route("/now", tell, methods=["GET"]))
    app.router.routes.append(Route("/typed", count, methods=["POST"]))
