"""Who may talk to the server: this computer's own page, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from app_process import wait_for
from fake_engine import FakeLoader
from starlette.testclient import TestClient

from app.models.service import ModelsService
from app.server import make_app
from app.service import ChatService
from app.settings import LoadSettings

PORT = 7860
GOOD = f"127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The whole application behind its guard, without a socket."""
    service = ChatService(tmp_path_factory.mktemp("home"), FakeLoader(), lambda: [("demo", "demo")])
    service.start()
    wait_for(lambda: service.holder.status().phase == "ready")
    with TestClient(
        make_app(service, ModelsService(service.home, service, {}), PORT), base_url=f"http://{GOOD}"
    ) as made:
        yield made
    service.close()


@pytest.mark.parametrize("host", [GOOD, f"localhost:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}"])
def test_its_own_addresses_are_answered(client: TestClient, host: str) -> None:
    answer = client.get("/health", headers={"host": host})
    assert answer.status_code == 200
    assert answer.json() == {"app": "localmoe", "version": "0.1.0", "status": "ready", "model": "demo"}


@pytest.mark.parametrize(
    "path", ["/health", "/", "/now", "/config", "/gradio_api/info", "/theme.css", "/nothing", "/assets/x.js"]
)
@pytest.mark.parametrize(
    "host",
    [
        "evil.example", f"evil.example:{PORT}", f"127.0.0.1.evil.example:{PORT}", "127.0.0.1",
        "127.0.0.1:80", "127.0.0.1:7861",
        f"0.0.0.0:{PORT}", f"[::2]:{PORT}", f"127.0.0.1:{PORT}@evil.example", f"localhost.:{PORT}", "",
        f"127.1:{PORT}",
    ],
)  # fmt: skip
def test_any_other_host_is_refused_on_every_route(client: TestClient, host: str, path: str) -> None:
    answer = client.get(path, headers={"host": host})
    assert answer.status_code == 403
    assert f"http://127.0.0.1:{PORT}: a tunnel to it needs the same port" in answer.text
    assert "\n" not in answer.text and "Content-Security-Policy" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        "null", "http://evil.example", f"https://{GOOD}", "http://127.0.0.1", "http://127.0.0.1:7861", "http://localhost",
        "http://[::1]", f"http://{GOOD}.evil.example", "file://", "", f"http://{GOOD}/",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/health", "/gradio_api/run/predict"])
def test_any_other_origin_is_refused(client: TestClient, origin: str, path: str) -> None:
    assert client.post(path, headers={"origin": origin}, json={}).status_code == 403
    assert client.get(path, headers={"origin": origin}).status_code == 403


@pytest.mark.parametrize("origin", [f"http://{GOOD}", f"http://localhost:{PORT}", f"http://[::1]:{PORT}"])
def test_its_own_origins_are_answered(client: TestClient, origin: str) -> None:
    assert client.get("/health", headers={"origin": origin}).status_code == 200


def test_two_hosts_in_one_request_are_refused(client: TestClient) -> None:
    headers = [("host", GOOD), ("host", "evil.example")]
    assert client.get("/health", headers=headers).status_code == 403


def test_another_page_may_link_here_but_not_fetch_from_here(client: TestClient) -> None:
    cross = {"sec-fetch-site": "cross-site"}
    assert client.get("/", headers={**cross, "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.get("/", headers={**cross, "sec-fetch-mode": "no-cors"}).status_code == 403
    assert client.get("/", headers=cross).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/", "/theme.css"])
def test_every_answer_forbids_other_servers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "http" not in policy and "*" not in policy
    assert headers["referrer-policy"] == "no-referrer" and headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/gradio_api/upload", "/gradio_api/proxy=http://evil.example/x"])
def test_routes_that_the_page_does_not_use_are_closed(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 403
    assert client.post(path, json={}).status_code == 403


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/redoc"])
def test_no_description_of_the_interface_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("name", ["/etc/passwd", "chats/x.json", "../settings.json"])
def test_no_file_of_the_computer_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/gradio_api/file={name}").status_code in (403, 404)


def test_no_listener_is_offered_as_an_interface(client: TestClient) -> None:
    assert client.get("/gradio_api/info").json() == {"named_endpoints": {}, "unnamed_endpoints": {}}


def test_the_page_names_no_other_server_that_a_browser_would_ask(client: TestClient) -> None:
    text = client.get("/").text
    assert "fonts.googleapis" not in text and "cdnjs" not in text and "preconnect" not in text


def test_a_load_error_is_a_status_and_not_the_end(service: ChatService) -> None:
    service.apply_load(LoadSettings(model="missing"))
    wait_for(lambda: service.holder.status().phase == "error")
    with TestClient(
        make_app(service, ModelsService(service.home, service, {}), PORT), base_url=f"http://{GOOD}"
    ) as other:
        assert other.get("/health").json()["status"] == "error"
        assert other.get("/").status_code == 200
