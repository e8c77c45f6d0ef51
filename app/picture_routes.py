"""The addresses that take a picture for a message and give it back. The guard in front of them keeps other
sites out."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

from app.engine_status import EngineStatus
from app.models.picture_settings import why_unread
from app.pictures import PictureError, picture_kind
from app.service import ChatService
from app.texts import ENGLISH, Texts, texts_for
from localmoe.core.errors import LocalMoeError
from localmoe.core.units import format_bytes
from localmoe.vision.image_file import MAX_IMAGE_BYTES

_KEPT = "private, max-age=31536000, immutable"  # what an id names never changes


def why_no_pictures(status: EngineStatus, t: Texts = ENGLISH) -> str:
    """Why a message may have no pictures now, and what to do; "" if it may."""
    if status.phase == "loading":
        return t("The model is still loading: attach pictures when it is ready.")
    if status.info is None:
        return t("No model is loaded: choose one that reads pictures under Models, then attach them again.")
    if not status.info.reads_images:
        return why_unread(status.model, t) or t(
            "{model} reads no pictures: load a model that does under Models, then attach them again.",
            model=status.info.name,
        )
    return ""


def add_picture_routes(app: FastAPI, service: ChatService) -> None:
    """POST /images, GET /images/ID. Before the page is mounted, which takes every other address."""

    @app.post("/images")
    async def take(request: Request, language: str = "") -> Response:
        t, data = texts_for(language), bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > MAX_IMAGE_BYTES:
                limit = format_bytes(MAX_IMAGE_BYTES)
                return _refused(t("The picture has more than {size}: use a smaller one.", size=limit), 413)
        if reason := await run_in_threadpool(why_no_pictures, service.holder.status(), t):
            return _refused(reason, 409)
        try:
            found = await run_in_threadpool(service.pictures.keep, bytes(data))
        except LocalMoeError as error:
            return _refused(t(str(error)), 400)
        return JSONResponse({"id": found})

    @app.get("/images/{wanted}")
    def give(wanted: str) -> Response:
        try:
            data = service.pictures.read(wanted)
        except PictureError as error:
            return PlainTextResponse(str(error), status_code=404)
        return Response(data, media_type=picture_kind(data), headers={"Cache-Control": _KEPT})


def _refused(sentence: str, status: int) -> Response:
    return JSONResponse({"error": sentence}, status_code=status)
