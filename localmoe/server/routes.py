"""The routes: models, health, OpenAI's chat and text completions and responses, Anthropic's messages. Hands
orders to the desk and decides nothing about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from localmoe import __version__
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import LocalMoeError
from localmoe.server.answers import AnswerResponse
from localmoe.server.completions_form import completions_form
from localmoe.server.completions_requests import chat_order, completion_order, usage_asked
from localmoe.server.completions_schema import ChatRequest, CompletionRequest
from localmoe.server.desk import AnswerDesk
from localmoe.server.errors import MESSAGES_PATH, ApiError, as_api_error, error_response
from localmoe.server.fields import parse
from localmoe.server.forms import Form
from localmoe.server.guard import OPEN_PATH, AddressGuard, KeyGuard
from localmoe.server.messages_form import MessagesForm
from localmoe.server.messages_requests import messages_order
from localmoe.server.messages_schema import MessagesRequest
from localmoe.server.order import Order
from localmoe.server.pictures import check_text_size
from localmoe.server.responses_form import responses_form
from localmoe.server.responses_requests import responses_order
from localmoe.server.responses_schema import ResponsesRequest
from localmoe.server.settings import MAX_BODY_BYTES, ServerSettings

T = TypeVar("T")
_READ = ["GET", "HEAD"]  # HEAD is what health checks ask
_QUICK_BYTES = 1 << 16  # larger bodies are read beside the event loop, so that others are answered meanwhile:
# a file of this size may be a picture with notes of 64 MiB, and a MiB of such takes two seconds
_MAX_DISCARDED_BYTES = 2 * MAX_BODY_BYTES  # a client that still sends would not read why it is refused


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that answers; context in tokens, created in seconds since 1970."""

    name: str
    context: int
    created: int

    def as_dict(self) -> dict[str, object]:
        """OpenAI's model object, with the context as others name it, and what Anthropic's has besides."""
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "localmoe",
            "max_model_len": self.context, "type": "model", "display_name": self.name,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
        }  # fmt: skip


def make_app(
    desk: AnswerDesk,
    model: ServedModel,
    settings: ServerSettings,
    hosts: frozenset[str] | None,
    count: Callable[[GenerationRequest], int],
) -> FastAPI:
    """The guarded application. hosts: see `AddressGuard`. count: tokens of a request's prompt."""
    app = FastAPI(title="localmoe", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_reports(app, desk, model)

    _add_answers(app, desk, model.name, settings)

    @app.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        def read(body: bytes) -> tuple[Order, None]:
            return messages_order(parse(MessagesRequest, body), model.name, settings), None

        order, _ = await _order(request, read)
        return {"input_tokens": await asyncio.to_thread(count, order.generation)}

    app.add_exception_handler(LocalMoeError, _refuse)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _gone)
    if settings.api_key is not None:  # the last one that is added comes first
        app.add_middleware(KeyGuard, key=settings.api_key)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            max_age=600,
        )
    app.add_middleware(AddressGuard, hosts=hosts, origins=settings.cors)
    return app


def _add_answers(app: FastAPI, desk: AnswerDesk, model: str, settings: ServerSettings) -> None:
    """A route for each API."""

    def chat(body: bytes) -> tuple[Order, Form]:
        asked = parse(ChatRequest, body)
        form = completions_form("chat", model, usage_asked=usage_asked(asked))
        return chat_order(asked, model, settings), form

    def text(body: bytes) -> tuple[Order, Form]:
        asked = parse(CompletionRequest, body)
        form = completions_form("text", model, usage_asked=usage_asked(asked))
        return completion_order(asked, model, settings.sampling), form

    def response(body: bytes) -> tuple[Order, Form]:
        asked = parse(ResponsesRequest, body)
        order = responses_order(asked, model, settings)
        return order, responses_form(asked, order.generation.sampling, model)

    def message(body: bytes) -> tuple[Order, Form]:
        return messages_order(parse(MessagesRequest, body), model, settings), MessagesForm(model)

    readers = {
        "/v1/chat/completions": chat, "/v1/completions": text, "/v1/responses": response,
        MESSAGES_PATH: message,
    }  # fmt: skip

    def add(path: str, read: Callable[[bytes], tuple[Order, Form]]) -> None:
        @app.post(path)
        async def answer(request: Request) -> Response:
            order, form = await _order(request, read)
            return AnswerResponse(desk, order, form)

    for path, read in readers.items():
        add(path, read)


def _add_reports(app: FastAPI, desk: AnswerDesk, model: ServedModel) -> None:
    started = time.monotonic()

    @app.api_route(OPEN_PATH, methods=_READ)
    async def health() -> dict[str, object]:
        running, waiting = desk.counts()
        return {
            "app": "localmoe",
            "version": __version__,
            "status": "ready",
            "running": running,
            "waiting": waiting,
            "uptime_s": round(time.monotonic() - started, 1),
        }

    @app.api_route("/v1/models", methods=_READ)
    @app.api_route("/v1/models/", methods=_READ)  # else it would be the model of no name
    async def models() -> dict[str, object]:
        page = {"has_more": False, "first_id": model.name, "last_id": model.name}
        return {"object": "list", "data": [model.as_dict()], **page}

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def one_model(name: str) -> dict[str, object]:
        if name not in (model.name, f"{model.name}/"):
            raise ApiError(404, f"There is no model '{name}' here.", param="model", code="model_not_found")
        return model.as_dict()


async def _order(request: Request, read: Callable[[bytes], tuple[Order, T]]) -> tuple[Order, T]:
    """What a request asks for, and what else `read` finds in its body.

    Raises:
        ApiError: the body is too large, or `read` refuses it.
    """
    body = await _body(request)

    def found() -> tuple[Order, T]:
        order, other = read(body)
        check_text_size(len(body), order.generation.messages)
        return order, other

    return await asyncio.to_thread(found) if len(body) > _QUICK_BYTES else found()


async def _body(request: Request) -> bytes:
    """The request's body, of bounded size.

    Raises:
        ApiError: 413; it is larger.
    """
    body, num_bytes = bytearray(), 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes <= MAX_BODY_BYTES:
            body += piece
        elif num_bytes > _MAX_DISCARDED_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        raise ApiError(
            413, f"The request is larger than the {MAX_BODY_BYTES} bytes that are read: shorten it."
        )
    return bytes(body)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    return error_response(as_api_error(error), request.url.path)


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    text = (
        f"There is no {request.method} {request.url.path} here: this server has GET /v1/models, GET /health, "
        "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /v1/messages and "
        "POST /v1/messages/count_tokens."
    )
    answer = error_response(ApiError(error.status_code, text, code="not_found"), request.url.path)
    answer.headers.update(error.headers or {})  # Allow, of 405
    return answer


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it
