"""The process: port, state file, refusals, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from app_process import FAKE, FORKED, ROOT, Server, answers, running_app, wait_for

from app.address import AddressRefusedError, bind, page_url
from app.main import main
from localmoe.server.address import AddressUnusableError, PortTakenError


def start(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run until it ends by itself."""
    env = {**os.environ, "LOCALMOE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *FAKE, "--no-browser", *options]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_running_app_says_where_it_is_and_tidies_up(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running_app(home, FAKE, FAKE_LOAD_S="3") as server:
        assert server.health() == {
            "app": "localmoe",
            "version": "0.1.0",
            "status": "loading",
            "model": "demo",
        }
        state = json.loads((home / "run" / "server.json").read_text())
        assert (state["pid"], state["host"], state["port"]) == (server.process.pid, "127.0.0.1", server.port)
        assert state["version"] == "0.1.0" and 0 <= time.time() - state["started"] < 60
        server.wait("ready")
        second = start(home, "--port", str(server.port))
        assert (second.returncode, second.stdout) == (98, "")
        assert f"Port {server.port} is taken: localmoe is already running at {server.url}" in second.stderr
        third = start(home, "--port", "0")  # on a port of its own
        assert (third.returncode, third.stdout) == (1, "")
        assert f"localmoe is already running at {server.url} " in third.stderr
        assert third.stderr.count("\n") == second.stderr.count("\n") == 1
        assert server.health()["status"] == "ready"
        with socket.create_connection(("127.0.0.1", server.port)) as half:  # of a request
            host = f"Host: 127.0.0.1:{server.port}"
            half.sendall(f"POST /typed HTTP/1.1\r\n{host}\r\nContent-Length: 9\r\n\r\n".encode())
            assert server.health()["status"] == "ready"  # by then it has been read
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=10) == 0
    assert not (home / "run" / "server.json").exists()
    assert "Traceback" not in (tmp_path / "home.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a device of Linux")
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>/dev/full"])
@pytest.mark.slow(but=1)
def test_it_runs_where_nothing_can_be_printed(streams: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    env = {**os.environ, "LOCALMOE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = shlex.join([sys.executable, *FAKE, "--no-browser", "--port", "0"])
    process = subprocess.Popen(f"exec {command} {streams}", shell=True, env=env, cwd=ROOT)
    try:
        state = home / "run" / "server.json"
        wait_for(lambda: state.exists() or process.poll() is not None, 60, "the state file")
        port = json.loads(state.read_text())["port"]
        server = Server(process, home, port)
        wait_for(lambda: answers(server) or process.poll() is not None, 60, "an answer on the port")
        server.wait("ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()


def test_a_home_that_cannot_be_used_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "file"))
    assert main(["--no-browser", "--port", "0"]) == 1
    printed = capsys.readouterr()
    assert "LOCALMOE_HOME" in printed.err and printed.err.count("\n") == 1


def test_an_address_of_the_hub_that_is_none_is_named(tmp_path: Path) -> None:
    """The Hub's own library ends at it in a traceback, when it is imported."""
    env = {**os.environ, "LOCALMOE_HOME": str(tmp_path), "HF_ENDPOINT": "http://[bad"}
    command = [sys.executable, "-m", "app", "--no-browser", "--port", "0"]
    ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "HF_ENDPOINT is 'http://[bad'" in ended.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com", ""])
def test_other_computers_are_never_let_in(host: str) -> None:
    with pytest.raises(AddressRefusedError, match=r"127\.0\.0\.1") as caught:
        bind(host, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("port", [-1, 65536, 10**9])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(AddressUnusableError, match="65535"):
        bind("127.0.0.1", port)


def test_a_taken_port_is_told_from_a_refused_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortTakenError):
            bind("127.0.0.1", taken.getsockname()[1])


def test_addresses_are_written_as_a_browser_wants_them() -> None:
    assert page_url("127.0.0.1", 80) == "http://127.0.0.1:80/"
    assert page_url("::1", 7860) == "http://[::1]:7860/"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--host", "0.0.0.0"], "other computers"), (["--draft-length", "-1"], "Draft length -1"),
        (["--vram-budget", "much"], "not a size"),
        (["--policy", "none"], "no policy"), (["--context", "3"], "Context"),
        (["--emulated-link", "0"], "speed"), (["--port", "70000"], "65535"),
        (["--better-draft", "maybe"], "on or off"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_in_one_sentence_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    word: str,
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    assert main(["--no-browser", "--port", "0", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and word in printed.err and printed.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(FORKED == FAKE, reason="apps are forked on Linux only")
def test_a_forked_app_says_what_it_says_otherwise_and_ends_as_it_does(tmp_path: Path) -> None:
    apart = start(tmp_path / "apart", "--context", "many")
    with (
        pytest.raises(AssertionError, match="many"),
        running_app(tmp_path / "home", FORKED, "--context", "many"),
    ):
        pass
    assert (tmp_path / "home.log").read_text() == apart.stderr != ""
    codes = []
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with running_app(tmp_path / "home", FORKED) as server:
            state = json.loads((server.home / "run" / "server.json").read_text())
            assert state["pid"] == server.process.pid != os.getpid()
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(timeout=0.01)
            server.process.send_signal(signum)
            codes.append(server.process.wait(timeout=10))
    assert codes == [0, -signal.SIGKILL]
