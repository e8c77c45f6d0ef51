"""A server whose engine does what the question says."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest
from api_rig import DEFAULTS, SECRET, Api, ScriptedEngine, event, running, wait_for

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import BudgetError, TransferError
from localmoe.core.stream import StreamEvent
from localmoe.server import answers
from localmoe.server.settings import ServerSettings


def script(request: GenerationRequest) -> Iterator[StreamEvent]:
    """What the message says: texts between bars, one a step; a word in capitals fails."""
    failures: dict[str, Exception] = {
        "TRANSFER": TransferError("A copy failed: try again."), "BUG": RuntimeError(SECRET),
        "MEMORY": BudgetError("The GPU's memory ran out: give less.", budget_bytes=1),
    }  # fmt: skip
    pieces = request.messages[-1].content.split("|")
    for i, piece in enumerate(pieces):
        if piece in failures:
            raise failures[piece]
        yield event(
            piece, "stop" if i + 1 == len(pieces) else None, opens=piece.startswith("opened"), tokens=i + 1
        )


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script)


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[Api]:
    with running(engine, ServerSettings(max_waiting=2, sampling=DEFAULTS)) as api:
        yield api


@pytest.fixture
def kept_waiting(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine takes a while to answer, in which streams have to be kept open many times."""
    monkeypatch.setattr(answers, "QUIET_S", 0.02)
    engine.open.clear()
    gate = threading.Timer(0.3, engine.open.set)
    gate.start()
    yield
    gate.join()


@pytest.fixture
def client(server: Api) -> Iterator[openai.OpenAI]:
    """OpenAI's own; all answers are over once it is closed."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="-", max_retries=0) as made:
        yield made
    wait_for(lambda: server.desk.counts() == (0, 0))


@pytest.fixture
def api(server: Api, engine: ScriptedEngine) -> Iterator[Api]:
    engine.asked.clear()
    engine.left.clear()
    engine.open.set()
    yield server
    engine.open.set()
    wait_for(lambda: server.desk.counts() == (0, 0))
