"""A server on a real socket in this process, and an engine whose steps a test decides."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx

from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.server.address import bind
from localmoe.server.desk import AnswerDesk
from localmoe.server.serving import make_server
from localmoe.server.settings import ServerSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
DEFAULTS = SamplingConfig(temperature=0.5, top_k=7, seed=1)  # of the server that questions script
SECRET = "what the user wrote"


@dataclass
class Api:
    """A running server."""

    port: int
    desk: AnswerDesk
    client: httpx.Client

    def post(self, path: str = CHAT, /, **body: Any) -> httpx.Response:
        if path == CHAT:
            body.setdefault("messages", HELLO)
        return self.client.post(path, json=body)

    def events(self, path: str = CHAT, /, **body: Any) -> list[Any]:
        """The data of a streamed answer's events; "[DONE]" is the last."""
        text = self.post(path, **body, stream=True).text
        data = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert data.pop() == "[DONE]"
        return [json.loads(line) for line in data]

    def begin(self, **body: Any) -> socket.socket:
        """A request whose answer is not read yet."""
        content = json.dumps({"messages": HELLO, **body}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        sock.sendall(head.encode() + content)
        return sock


@contextlib.contextmanager
def running(engine: Any, settings: ServerSettings | None = None) -> Iterator[Api]:
    """The server on a free port; ends as it does after Ctrl+C."""
    sock, ready = bind("127.0.0.1", 0), threading.Event()
    port = sock.getsockname()[1]
    server, desk = make_server(engine, sock, settings or ServerSettings(), ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    assert ready.wait(30)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield Api(port, desk, client)
    finally:
        server.should_exit = True
        thread.join()
        desk.join()
        sock.close()


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    waited = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        waited.wait(0.005)
    raise AssertionError(f"waited {timeout_s} s in vain")


def event(
    text: str = "", finish: Any = None, *, opens: bool = False, tokens: int = 1, tool_format: str = ""
) -> StreamEvent:
    stats = GenerationCounters(prompt_tokens=3, new_tokens=tokens).freeze()
    return StreamEvent(text, (1,), 0, finish, stats, opens_reasoning=opens, tool_format=tool_format)


class ScriptedEngine:
    """Answers with what `script` yields for a request; notes who was asked, and how it was left."""

    def __init__(
        self, script: Callable[[GenerationRequest], Iterator[StreamEvent]], *, opened: bool = False
    ) -> None:
        self.script = script
        self.asked: list[str] = []
        self.last: GenerationRequest | None = None
        self.left: list[str] = []
        self.open = threading.Event()  # what each step waits for
        if opened:
            self.open.set()
        self.captured: list[SamplingConfig | None] = []  # each time that nobody waited
        self.captures = SimpleNamespace(begin=lambda sampling=None: self.captured.append(sampling))
        self.prepared = threading.Event()
        self.prepare_grammars = self.prepared.set

    def encode(self, request: GenerationRequest, context: int) -> list[int]:
        """A token a character; refuses what does not fit, as engines do."""
        text = "".join(message.content for message in request.messages)
        assert len(text) < context
        return [1] * len(text)

    def info(self) -> Any:
        return SimpleNamespace(name="scripted", context=64)

    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        assert stop is not None
        self.last = request
        self.asked.append(request.messages[-1].content)
        try:
            for found in self.script(request):
                while not self.open.wait(0.002):
                    if stop.is_set():
                        break
                if stop.is_set():
                    yield event(finish="cancelled")
                    return
                yield found
        finally:
            self.left.append(self.asked[-1])


def refusal(answer: httpx.Response, status: int) -> dict[str, str | None]:
    """The error object, of OpenAI's shape, in one sentence."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert (
        "\n" not in error["message"]
        and "Traceback" not in error["message"]
        and error["message"].endswith(".")
    )
    return error
