"""Proxies, certificates and addresses in the environment that cannot be used: one sentence that names them,
before anything is asked, and never one about the disk."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from support.hub_home import NEEDED, QUICK, REPO, hub_and_home, small_model
from support.hub_server import HubServer

from localmoe.cli.hub_process import HubProcess
from localmoe.cli.main import main
from localmoe.core.errors import ConfigError, DownloadError
from localmoe.hub import downloads
from localmoe.hub.downloads import download_model
from localmoe.hub.remote_repo import RemoteRepo
from localmoe.hub.search import search_models
from localmoe.hub.token import hub_token

SETTINGS = [
    ("ALL_PROXY", "socks5://127.0.0.1:9", "socksio"),
    ("HTTP_PROXY", "foo:bar", "Invalid port"),
    ("HTTPS_PROXY", "gopher://127.0.0.1:9", "Unknown scheme"),
    ("SSL_CERT_FILE", "/nonexistent/ca.pem", "No such file"),
]
ADDRESSES = ["http://[bad", "huggingface.co", "https:hub", "https://hub:port", "ftp://hub"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setitem(sys.modules, "socksio", None)  # also where it is installed
    with hub_and_home(tmp_path) as server:
        server.commit(REPO, small_model())
        yield server


def questions() -> list[str]:
    """What each way to the Hub says."""
    said = []
    for ask in (
        lambda: download_model(REPO, options=QUICK),
        lambda: RemoteRepo(REPO).about(None),
        lambda: search_models("moe"),
    ):
        with pytest.raises(DownloadError) as refusal:
            ask()
        said.append(str(refusal.value))
    return said


@pytest.mark.parametrize(("name", "value", "reason"), SETTINGS)
def test_a_setting_that_cannot_be_used_is_named(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    for text in questions():
        assert name in text and reason in text and text.endswith("correct or unset them, and try again.")
    assert not hub.requests


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_endpoint_that_is_no_address_is_named(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert all(f"HF_ENDPOINT is '{address}'" in text for text in questions())


def test_a_setting_that_goes_wrong_between_the_questions_and_the_files_is_no_fault_of_the_disk(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.on_file = lambda _: monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent/ca.pem")  # config.json
    with pytest.raises(DownloadError, match=r"settings \(.*SSL_CERT_FILE.* cannot be used \(.*No such file"):
        download_model(REPO, options=QUICK)


def test_the_disk_s_errors_are_still_said_to_be_the_disk_s(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("settle", "prepare", "held_bytes", "publish"):
        with monkeypatch.context() as patch:
            patch.setattr(downloads.DownloadFolder, name, refuse)
            with pytest.raises(DownloadError, match=r"Writing the download to .* failed \(Input/output"):
                download_model(REPO, options=QUICK)
    assert all((download_model(REPO, options=QUICK) / name).exists() for name in NEEDED)


def test_the_command_says_it_in_one_line(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://[bad")
    assert main(["pull", REPO]) == 1
    assert "HF_ENDPOINT is 'http://[bad'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("ALL_PROXY", "socks5://127.0.0.1:9"), ("HF_ENDPOINT", "http://[bad")]
)
def test_the_page_s_process_answers_with_the_sentence(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    output = io.StringIO()
    HubProcess(output).serve(io.StringIO('{"id": 1, "do": "search", "with": {"query": "moe"}}\n'))
    deadline = time.monotonic() + 60
    while not output.getvalue().endswith("\n"):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)
    error = json.loads(output.getvalue())["error"]
    assert error["kind"] == "DownloadError" and name in error["text"]


def test_a_token_that_cannot_be_read_is_one_sentence(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path))  # a folder
    with pytest.raises(ConfigError, match=r"token in .* cannot be read \(Is a directory\): make that file"):
        hub_token()
