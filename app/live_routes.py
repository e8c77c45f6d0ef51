"""The addresses that the page's own scripts ask: what the engine does now, its timeline, the log. Behind the
guard like every other route; nothing here changes anything but whether steps are recorded."""

from __future__ import annotations

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, PlainTextResponse

from app.live_view import live_json
from app.service import ChatService
from app.texts import texts_for
from localmoe.core.timeline import trace_events

_FRESH = {"Cache-Control": "no-store"}


def add_live_routes(app: FastAPI, service: ChatService) -> None:
    """Before the page is mounted, which takes every other address."""

    @app.get("/live")
    def live(language: str = "en", timeline: bool = False) -> JSONResponse:
        look = service.live.look(timeline=timeline)
        told = live_json(
            look, answering=service.runner.running(), timeline=timeline, t=texts_for(language),
            plan=service.holder.status().plan,
        )  # fmt: skip
        return JSONResponse(told, headers=_FRESH)

    @app.get("/live/timeline.json")
    def timeline_file() -> JSONResponse:
        look = service.live.look()
        name = service.holder.status().model
        found = trace_events(look.steps if look is not None else (), f"localmoe {name}")
        return JSONResponse(found, headers=_save_as("localmoe-timeline.json"))

    @app.get("/log")
    def log(after: int = Query(0, ge=0)) -> JSONResponse:
        lines = [line.as_dict() for line in service.logs.lines(after)]
        return JSONResponse({"lines": lines}, headers=_FRESH)

    @app.get("/log/file")
    def log_file() -> PlainTextResponse:
        return PlainTextResponse(service.logs.text(), headers=_save_as("localmoe.log"))


def _save_as(name: str) -> dict[str, str]:
    return {**_FRESH, "Content-Disposition": f'attachment; filename="{name}"'}
