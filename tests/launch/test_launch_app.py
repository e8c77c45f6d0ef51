"""Real starts of an installed checkout: second start, ports, a running one, signals, exit codes, the browser.

Does not test set-up.
"""

from __future__ import annotations

import http.server
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from launch_checkout import Checkout, Running, free_port

pytestmark = pytest.mark.skipif(os.name == "nt", reason="drives POSIX signals")
RUNNING = "localmoe is ready at"


def options_of_the_app(checkout: Checkout) -> dict[str, object]:
    return json.loads((checkout.home / "options.json").read_text())


def signals_of_the_app(checkout: Checkout) -> list[str]:
    return (checkout.home / "signals.txt").read_text().split()


def browser_that_notes(folder: Path) -> tuple[str, Path]:
    """A BROWSER command and the file in which it notes the addresses that it opened."""
    script, notes = folder / "browser.py", folder / "opened.txt"
    script.write_text(f"import sys\nopen({str(notes)!r}, 'a').write(sys.argv[1] + '\\n')\n")
    return f"{sys.executable} {script} %s", notes


def wait_until_written(path: Path) -> list[str]:
    deadline = time.monotonic() + 10
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text().split()


def test_a_second_start_is_on_the_page_within_five_seconds_without_pip(ready: Checkout) -> None:
    port = free_port()
    start = ready.start("--no-browser", "--port", str(port), PIP_INDEX_URL="http://127.0.0.1:9/none")
    assert start.wait_for(f"{RUNNING} http://127.0.0.1:{port}") < 5
    assert "Setting up" not in start.output
    assert not (ready.home / "logs" / "setup.log").exists()


@pytest.mark.parametrize("streams", [">&-", ">&- 2>&- <&-", ">/dev/full"])
@pytest.mark.slow(but=1)
def test_a_start_needs_nobody_who_reads_what_it_prints(streams: str, ready: Checkout) -> None:
    if "full" in streams and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    command = shlex.join([sys.executable, str(ready.root / "launch.py"), "--no-browser"])
    port = free_port()
    start = Running(["sh", "-c", f"exec {command} --port {port} {streams}"], ready.env())
    ready.starts.append(start)
    deadline = time.monotonic() + 30
    while not (ready.home / "options.json").exists():
        assert time.monotonic() < deadline and start.process.poll() is None, start.output
        time.sleep(0.02)
    assert options_of_the_app(ready)["port"] == str(port)


def test_the_options_reach_the_app_and_a_models_relative_folder_is_found(
    ready: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    port = str(free_port())
    start = ready.start("--no-browser", "--port", port, "--model", "my model", "--vram-budget", "10GiB")
    start.wait_for(RUNNING)
    assert options_of_the_app(ready) == {
        "host": "127.0.0.1",
        "port": port,
        "model": str(tmp_path / "my model"),
        "vram_budget": "10GiB",
        "no_browser": True,
    }


def test_a_taken_port_moves_to_the_next_free_one(ready: Checkout) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
        start = ready.start("--no-browser", "--port", str(port))
        start.wait_for(f"{RUNNING} http://127.0.0.1:{port + 2}")
    assert f"Port {port} is taken; using {port + 2}." in start.output
    assert start.output.count("Starting localmoe") == 1, "no app is started only to lose its port"


def test_a_port_lost_between_the_look_and_the_apps_start_moves_on_too(ready: Checkout) -> None:
    port = free_port()
    start = ready.start("--no-browser", "--port", str(port), FAKE_APP_LOSES_PORT=str(port))
    start.wait_for(f"{RUNNING} http://127.0.0.1:{port + 1}")


def test_a_start_while_one_is_running_opens_that_one(ready: Checkout, tmp_path: Path) -> None:
    browser, notes = browser_that_notes(tmp_path)
    port = free_port()
    first = ready.start("--port", str(port), BROWSER=browser)
    first.wait_for(RUNNING)
    assert wait_until_written(notes) == [f"http://127.0.0.1:{port}"]
    notes.unlink()
    second = ready.run("--port", str(port), BROWSER=browser)
    assert second.exit_code() == 0
    assert f"already running at http://127.0.0.1:{port}" in second.output
    assert time.monotonic() - second.began < 5
    assert wait_until_written(notes) == [f"http://127.0.0.1:{port}"]


def test_a_page_that_outlived_its_launcher_is_found_again(ready: Checkout) -> None:
    first = ready.start("--no-browser", "--port", str(free_port()))
    first.wait_for(RUNNING)
    app = next(pid for pid in children_of(first.process.pid))
    first.process.kill()
    try:
        assert "already running at" in ready.run("--no-browser").output
    finally:
        os.kill(app, signal.SIGTERM)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class NotLocalmoe(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"app": "another"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_stale_note_of_a_running_app_is_ignored(ready: Checkout) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), NotLocalmoe) as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        state = ready.home / "run" / "server.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"pid": 1, "host": "127.0.0.1", "port": other.server_port}))
        start = ready.start("--no-browser", "--port", str(free_port()))
        start.wait_for(RUNNING)
        other.shutdown()
        thread.join()
    assert "already running" not in start.output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_reaches_the_app_once_and_its_exit_code_is_passed_on(
    ready: Checkout, signum: signal.Signals
) -> None:
    start = ready.start("--no-browser", "--port", str(free_port()), FAKE_APP_EXIT="7")
    start.wait_for(RUNNING)
    os.killpg(start.process.pid, signum)  # as a terminal does
    os.kill(start.process.pid, signum)  # and some tools, such as timeout, do both
    assert start.exit_code() == 7
    assert signals_of_the_app(ready) == [signum.name]
    assert "Traceback" not in start.output


def test_a_second_stop_signal_ends_an_app_that_ignores_the_first(ready: Checkout) -> None:
    start = ready.start("--no-browser", "--port", str(free_port()), FAKE_APP_STUBBORN="1")
    start.wait_for(RUNNING)
    start.process.send_signal(signal.SIGINT)
    wait_until_written(ready.home / "signals.txt")
    time.sleep(1.2)
    assert start.end(signal.SIGINT) == 128 + signal.SIGKILL


def test_an_app_that_fails_by_itself_passes_its_exit_code_on(ready: Checkout) -> None:
    assert ready.run("--no-browser", FAKE_APP_CRASH="3").exit_code() == 3


def test_an_address_of_another_machine_is_refused_in_one_sentence(ready: Checkout) -> None:
    run = ready.run("--no-browser", "--host", "192.0.2.1")
    assert run.exit_code() == 1
    assert run.output == "'192.0.2.1' is no address of this machine: use 127.0.0.1.\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a folder that no one may write to")
def test_a_home_folder_that_cannot_be_written_gives_one_sentence(ready: Checkout) -> None:
    run = ready.run("--no-browser", LOCALMOE_HOME="/sys/localmoe")
    assert run.exit_code() == 1
    assert run.output.startswith("/sys/localmoe")
    assert "make it writable, or move localmoe or LOCALMOE_HOME, and start again." in run.output
    assert run.output.count("\n") == 1
