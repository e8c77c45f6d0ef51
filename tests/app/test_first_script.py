"""The page's document carries the script before all others, whole; nothing else is touched."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from app.first_script import FirstScript

PAGE = "<!doctype html><html><head><script>first = 1</script></head><body>\u4f60\u597d <head></body></html>"


def answer(request: Request) -> Response:
    assert request.method == "HEAD" or request.url.path != "/" or "accept-encoding" not in request.headers
    match request.query_params.get("kind"):
        case "pieces":
            return StreamingResponse([PAGE[:9].encode(), PAGE[9:].encode()], media_type="text/html")
        case "none":
            return PlainTextResponse("no page", status_code=503, headers={"retry-after": "3"})
        case _:
            return HTMLResponse(PAGE)


@pytest.fixture
def client() -> TestClient:
    app = Starlette(routes=[Route("/", answer), Route("/other", answer)])
    return TestClient(FirstScript(app, "early = '\u00e4'"))


@pytest.mark.parametrize("kind", ["whole", "pieces"])
def test_the_script_comes_first_in_the_documents_head_and_once(client: TestClient, kind: str) -> None:
    got = client.get("/", params={"kind": kind})
    assert got.text == PAGE.replace("<head>", "<head><script>early = '\u00e4'</script>", 1)
    assert int(got.headers["content-length"]) == len(got.content)


def test_other_routes_methods_and_answers_are_as_they_were(client: TestClient) -> None:
    assert client.get("/other").text == PAGE
    head = client.head("/")
    assert head.status_code == 200 and head.text == ""
    none = client.get("/", params={"kind": "none"})
    assert (none.status_code, none.text, none.headers["retry-after"]) == (503, "no page", "3")
