"""The addresses that give a chat as a file and take one. The guard in front of them keeps other sites
out; what is in a file is checked elsewhere."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

from app.chat_markdown import export_markdown
from app.chat_transfer import MAX_WITH_PICTURES, export_json
from app.chats import ChatError
from app.service import ChatService
from app.texts import texts_for
from localmoe.core.errors import LocalMoeError


def add_chat_routes(app: FastAPI, service: ChatService) -> None:
    """GET /chats/ID.json, GET /chats/ID.md, POST /chats."""

    @app.get("/chats/{chat_id}.json")
    def get_json(chat_id: str) -> Response:
        return _file(service, chat_id, "json", "")

    @app.get("/chats/{chat_id}.md")
    def get_markdown(chat_id: str, language: str = "") -> Response:
        return _file(service, chat_id, "md", language)

    @app.post("/chats")
    async def take(request: Request) -> Response:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > MAX_WITH_PICTURES:
                break  # what is too large is refused by its first bytes
        try:
            chat_id = await run_in_threadpool(service.import_chat, bytes(data))
        except LocalMoeError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse({"id": chat_id})


def _file(service: ChatService, chat_id: str, kind: str, language: str) -> Response:
    try:
        chat = service.chats.get(chat_id)
    except ChatError as error:
        return PlainTextResponse(str(error), status_code=404)
    try:
        if kind == "json":
            text = export_json(chat, service.pictures.read_all(chat.tree.images()))
        else:
            text = export_markdown(chat, texts_for(language))
    except LocalMoeError as error:
        return PlainTextResponse(str(error), status_code=409)
    name = "".join(char if char.isalnum() or char in " -_" else "_" for char in chat.title).strip() or "chat"
    kept = f"attachment; filename=\"chat.{kind}\"; filename*=UTF-8''{quote(f'{name}.{kind}')}"
    media = "application/json" if kind == "json" else "text/markdown; charset=utf-8"
    return Response(
        text, media_type=media, headers={"Content-Disposition": kept, "Cache-Control": "no-store"}
    )
