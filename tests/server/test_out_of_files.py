"""A server whose process has no file descriptor left for another connection."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from localmoe.server.out_of_files import say_it_seldom

SERVER = """
import os, resource, socket
from types import SimpleNamespace
from fastapi import FastAPI
from localmoe.server.serving import ApiServer

app = FastAPI()
app.get("/health")(lambda: "well")
sock = socket.create_server(("127.0.0.1", 0), backlog=128)

def started():
    most = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 6, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print(sock.getsockname()[1], flush=True)

ApiServer(app, SimpleNamespace(close=lambda: None), started).run(sockets=[sock])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts its files in /proc")
def test_it_says_so_once_and_answers_when_others_are_closed() -> None:
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = threading.Timer(60, process.kill)
    end.start()
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        time.sleep(2.5)  # asyncio tries again each second
        for connection in idle:
            connection.close()
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=20).json() == "well"
    finally:
        process.terminate()
        said = process.communicate(timeout=20)[1]
        end.cancel()
    assert said.count("\n") == 1 and "`ulimit -n`" in said, said


def test_a_server_that_ends_meanwhile_says_nothing_of_sockets_that_it_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_it_seldom()
    log = logging.getLogger("asyncio")
    for callback in ("BaseSelectorEventLoop._start_serving(...)", "something_else()"):
        try:
            raise ValueError("Invalid file descriptor: -1")
        except ValueError:
            log.exception("Exception in callback %s", callback)
    assert [record.getMessage() for record in caplog.records] == ["Exception in callback something_else()"]
