"""The addresses that take pictures and give them back."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_process import wait_for
from fake_engine import SEEING, FakeLoader
from picture_files import picture
from starlette.testclient import TestClient

from app import pictures
from app.engine_holder import UNLOADED
from app.engine_status import EngineStatus
from app.models.service import ModelsService
from app.picture_routes import why_no_pictures
from app.pictures import picture_id
from app.server import make_app
from app.service import ChatService
from app.settings import LoadSettings
from app.status_html import header_html
from app.texts import ENGLISH, IN_CHINESE
from localmoe.vision.image_file import MAX_IMAGE_BYTES

PORT = 7860
RED = picture("red")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatService]:
    made = ChatService(tmp_path_factory.mktemp("home"), FakeLoader(), lambda: [])
    load(made, SEEING)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(service: ChatService) -> Iterator[TestClient]:
    app = make_app(service, ModelsService(service.home, service, {}), PORT)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}") as made:
        yield made


def kept(service: ChatService) -> set[str]:
    return {path.name for path in (service.home / "images").glob("*")}


def load(service: ChatService, model: str) -> None:
    service.apply_load(LoadSettings(model=model))
    wait_for(lambda: service.holder.status().phase != "loading")


@pytest.mark.parametrize(
    ("kind", "media"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif"),
     ("BMP", "image/bmp")],
)  # fmt: skip
def test_what_is_uploaded_is_served_as_what_it_is(client: TestClient, kind: str, media: str) -> None:
    data = picture(kind=kind)
    answer = client.post("/images", content=data, headers={"content-type": "text/html"})
    assert (answer.status_code, answer.json()) == (200, {"id": picture_id(data)})
    given = client.get(f"/images/{picture_id(data)}")
    assert given.content == data and given.headers["content-type"] == media
    assert given.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert given.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in given.headers["content-security-policy"]


@pytest.mark.parametrize("wanted", ["a" * 64, "x", "..%2Fsettings.json", "%2Fetc%2Fpasswd", "A" * 64])
def test_nothing_else_is_served(client: TestClient, wanted: str) -> None:
    assert client.get(f"/images/{wanted}").status_code == 404


def test_what_is_none_or_too_large_is_refused_in_one_sentence(
    client: TestClient, service: ChatService
) -> None:
    def refused(data: bytes, query: str = "") -> tuple[int, str]:
        answer = client.post(f"/images{query}", content=data)
        return answer.status_code, answer.json()["error"]

    before = kept(service)
    none = "It is no picture that can be read: use PNG, JPEG, WEBP, GIF or BMP."
    assert refused(b"<html>") == refused(b"") == (400, none)
    assert refused(b"<html>", "?language=zh-CN") == (400, IN_CHINESE(none))
    assert IN_CHINESE(none) != none
    status, sentence = refused(bytes(MAX_IMAGE_BYTES + 1))
    assert status == 413 and "more than 32.0 MiB" in sentence
    assert kept(service) == before


def test_a_full_disk_is_one_sentence(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pictures, "write_whole", full)
    answer = client.post("/images", content=picture("green"))
    assert answer.status_code == 400 and "make room there" in answer.json()["error"]


def test_other_sites_send_and_see_none(client: TestClient) -> None:
    evil = {"origin": "http://evil.example"}
    assert client.post("/images", content=RED, headers=evil).status_code == 403
    assert client.post("/images", content=RED).status_code == 200
    cross = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert client.get(f"/images/{picture_id(RED)}", headers=cross).status_code == 403


@pytest.mark.parametrize("path", ["/images", "/chats"])
def test_a_page_that_is_closed_as_it_sends_is_no_error(client: TestClient, path: str) -> None:
    """Which the log would have with a traceback."""
    received = iter(
        ({"type": "http.request", "body": RED[:9], "more_body": True}, {"type": "http.disconnect"})
    )
    sent: list[Any] = []

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", f"127.0.0.1:{PORT}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(client.app(scope, receive, send))
    assert sent[0]["status"] == 400


def test_a_model_that_reads_none_is_said_with_what_to_do(client: TestClient, service: ChatService) -> None:
    assert why_no_pictures(service.holder.status()) == ""
    assert "reads pictures" in header_html(service.holder.status())
    load(service, "demo")
    answer = client.post("/images?language=en", content=picture("blue"))
    assert answer.status_code == 409 and picture_id(picture("blue")) not in kept(service)
    sentence = "fake-moe reads no pictures: load a model that does under Models, then attach them again."
    assert answer.json()["error"] == sentence
    assert "reads pictures" not in header_html(service.holder.status())
    assert "fake-moe 不能读取图片" in client.post("/images?language=zh", content=RED).json()["error"]
    load(service, SEEING)


@pytest.mark.parametrize(
    ("status", "begin"),
    [
        (EngineStatus("loading"), "The model is still loading: attach"),
        (EngineStatus("error", error=UNLOADED), "No model is loaded: choose one that reads pictures"),
    ],
)
def test_without_a_model_none_is_taken(status: EngineStatus, begin: str) -> None:
    assert why_no_pictures(status, ENGLISH).startswith(begin)
    assert why_no_pictures(status, IN_CHINESE) != why_no_pictures(status, ENGLISH)
