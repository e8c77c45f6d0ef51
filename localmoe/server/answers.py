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

QUIET_S = 15.0  # of a stream: clients give up one that has said nothing for minutes, not even its status


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
    """Answers an order. Of a whole answer an error is an HTTP status; of a stream it is one before the first
    text, as long as that comes soon, and else an event."""

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
            if self._order.streamed:
                await self._stream(deltas, scope, receive, send)
                return
            try:
                whole = self._form.whole([delta async for delta in deltas])
            except Exception as error:
                await error_response(as_api_error(error), scope["path"])(scope, receive, send)
                return
            await JSONResponse(whole)(scope, receive, send)

    async def _stream(
        self, deltas: AsyncGenerator[Delta], scope: Scope, receive: Receive, send: Send
    ) -> None:
        events, last = _Events(send), None
        keeping = asyncio.create_task(events.keep_open())
        try:
            async for delta in deltas:
                opening = self._form.opening(delta) if last is None else b""
                await events.write(opening + self._form.piece(delta))
                last = delta
            assert last is not None, "an answer has a last delta"
            await events.write(self._form.closing(last), more=False)
        except Exception as error:
            if events.leave_to_others():
                await error_response(as_api_error(error), scope["path"])(scope, receive, send)
            else:
                await events.write(self._form.failure(as_api_error(error)), more=False)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


class _Events:
    """A stream of events, whose status is sent with what is written first."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()  # two write
        self._begun = self._over = False
        self._quiet = True  # since `keep_open` looked last

    async def keep_open(self) -> None:
        """Until it is cancelled: write comments, which clients skip, while nothing else is written."""
        while True:
            await asyncio.sleep(QUIET_S)
            async with self._lock:
                if self._quiet and not self._over:
                    await self._put(b": waiting\n\n", more=True)
                self._quiet = True

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Events, the last ones if there are no more."""
        async with self._lock:
            self._quiet, self._over = False, not more
            await self._put(data, more=more)

    def leave_to_others(self) -> bool:
        """Whether nothing was written; then nothing will be."""
        self._over = self._over or not self._begun
        return not self._begun

    async def _put(self, data: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")
            ]  # fmt: skip
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
