"""The HTTP answer to one order: waits for the desk without blocking the event loop, sends JSON or a stream of
events, and withdraws the order when its client goes away. Decides no text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from localmoe.server.deltas import Delta
from localmoe.server.desk import AnswerDesk
from localmoe.server.errors import as_api_error, error_response
from localmoe.server.forms import Form
from localmoe.server.order import Order


async def deltas_of(desk: AnswerDesk, order: Order) -> AsyncGenerator[Delta]:
    """The answer to an order, piece by piece. Closing the generator withdraws the order.

    Raises:
        Exception: what ended the answer.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    def deliver(item: Delta | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    ticket = desk.submit(order, deliver)
    try:
        while True:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish is not None:
                return
    finally:
        desk.withdraw(ticket)


class AnswerResponse(Response):
    """Answers an order; an error before the first text is an HTTP status, a later one an event."""

    def __init__(self, desk: AnswerDesk, order: Order, form: Form) -> None:
        super().__init__()
        self._desk, self._order, self._form = desk, order, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless the client goes away before it is whole."""
        sending = asyncio.create_task(self._send(scope, receive, send))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(deltas_of(self._desk, self._order)) as deltas:
            try:
                first = await anext(deltas)
                if not self._order.streamed:
                    whole = self._form.whole([first, *[delta async for delta in deltas]])
            except Exception as error:
                await error_response(as_api_error(error), scope["path"])(scope, receive, send)
                return
            if self._order.streamed:
                await self._stream(first, deltas, send)
            else:
                await JSONResponse(whole)(scope, receive, send)

    async def _stream(self, first: Delta, deltas: AsyncGenerator[Delta], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _write(send, self._form.opening(first) + self._form.piece(first))
        last = first
        try:
            async for last in deltas:
                await _write(send, self._form.piece(last))
            end = self._form.closing(last)
        except Exception as error:
            end = self._form.failure(as_api_error(error))
        await _write(send, end, more=False)


async def _write(send: Send, data: bytes, *, more: bool = True) -> None:
    if data or not more:
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
