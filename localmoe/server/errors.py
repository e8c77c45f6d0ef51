"""Errors as the APIs word them: a status, and OpenAI's `{"error": {"message", "type", "param", "code"}}` or,
of the Messages API, Anthropic's `{"type": "error", "error": {"type", "message"}}`. Decides nothing about what
is allowed."""

from __future__ import annotations

import logging

from starlette.responses import JSONResponse

from localmoe.core.errors import (
    BudgetError,
    ConfigError,
    ContextLengthError,
    DraftError,
    DraftingRefusedError,
    EngineBusyError,
    EngineClosedError,
    LocalMoeError,
)

MESSAGES_PATH = "/v1/messages"
_TYPES = {  # Anthropic's, by status
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error",
}  # fmt: skip
_LOG = logging.getLogger(__name__)
_OF_REQUEST = (ConfigError, DraftError, DraftingRefusedError)
_FOR_NOW = (BudgetError, EngineBusyError, EngineClosedError)


class ApiError(LocalMoeError):
    """What a client is told. param: the field at fault; retry_after_s: when asking again makes sense;
    too_long: tokens of a prompt, and of the context that does not hold them."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        too_long: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code
        self.retry_after_s, self.too_long = retry_after_s, too_long

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def message_body(self) -> dict[str, object]:
        """Anthropic's error object. Of a prompt that is too long it ends with the words of Anthropic's own
        server, by which clients know that they have to shorten the conversation."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        message = str(self)
        if self.too_long is not None:
            tokens, most = self.too_long
            message += f" prompt is too long: {tokens} tokens > {most} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The whole HTTP answer to who asked at this path."""
    headers = {"Connection": "close"} if error.status == 413 else {}  # the rest of the body is not read
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    in_messages = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return JSONResponse(error.message_body() if in_messages else error.body(), error.status, headers)


def as_api_error(error: Exception) -> ApiError:
    """Whatever ended an answer, for its client. A fault of the program's own is logged; its text, which might
    quote another's chat, is not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        too_long = error.num_tokens, error.context
        return ApiError(400, str(error), code="context_length_exceeded", too_long=too_long)
    if isinstance(error, _OF_REQUEST):
        return ApiError(400, str(error))
    if isinstance(error, LocalMoeError):
        return ApiError(503 if isinstance(error, _FOR_NOW) else 500, str(error))
    _LOG.error("an answer failed", exc_info=error)
    return ApiError(500, f"The server failed inside ({type(error).__name__}): its log has the place.")
