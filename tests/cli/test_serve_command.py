"""`localmoe serve`: what it refuses before it loads, and how a process of its own starts and ends."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from localmoe.cli.main import main
from localmoe.core.errors import ConfigError
from localmoe.engine import Engine


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["serve", "no-such/model", *options]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "Traceback" not in printed.err
    return printed.err


def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCALMOE_API_KEY", raising=False)
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install 'fastapi" in refused(capsys)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"Port {port} is taken" in refused(capsys, "--port", port)
    for host in ("0.0.0.0", "::"):
        assert "--api-key" in refused(capsys, "--host", host, "--port", "0")
    assert "no address" in refused(capsys, "--host", "no such host", "--port", "0")
    assert "cannot be used" in refused(capsys, "--host", "192.0.2.1", "--port", "0")
    assert "65535" in refused(capsys, "--port", "70000")
    assert "API key" in refused(capsys, "--api-key", "")
    assert "--api-key" in refused(capsys, "--cors", "*")
    assert "Temperature" in refused(capsys, "--temperature", "-1")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_it_in_order_unless_nohup_started_it(
    ignored: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object, **__: object) -> Engine:
        signal.raise_signal(signal.SIGHUP)
        raise ConfigError("It goes on.")

    monkeypatch.setattr(Engine, "load", load)
    signals = (signal.SIGHUP, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in signals]
    try:
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            assert main(["serve", "demo", "--port", "0"]) == 1 and "It goes on." in capsys.readouterr().err
        else:
            with pytest.raises(SystemExit) as end:
                main(["serve", "demo", "--port", "0"])
            assert end.value.code == 0
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_serves_with_a_key_and_ends_an_answer_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_API_KEY", "secret-1")
    environment = {**os.environ, "LOCALMOE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "localmoe.cli", "serve", "demo", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    end = threading.Timer(120, process.kill)
    end.start()
    try:
        lines = [process.stderr.readline()]
        while lines[-1] and "curl" not in lines[-1]:
            lines.append(process.stderr.readline())
        port = int(re.findall(r"127\.0\.0\.1:(\d+)/v1", lines[-1])[0])
        curl, url, _, key, _, kind, _, body = shlex.split(lines[-1])
        headers = dict(header.split(": ") for header in (os.path.expandvars(key), kind))
        answer = httpx.post(url, headers=headers, content=body, timeout=60)
        assert curl == "curl" and answer.json()["choices"][0]["message"]["content"].startswith("Hello")
        with anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="secret-1", max_retries=0
        ) as other:
            asked: Any = [{"role": "user", "content": "Hello"}]
            message = other.messages.create(model="claude-any", max_tokens=9, messages=asked)
            (said,) = message.content
            assert said.type == "text" and said.text.startswith("Hello") and message.model == "demo"
            counted = other.messages.count_tokens(model="demo", messages=asked).input_tokens
            usage = message.usage
            assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="secret-1", max_retries=0
        ) as client:
            stream = client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Tell me a long story."}], stream=True,
                temperature=1.0, seed=3, extra_body={"min_p": 0.3},
            )  # fmt: skip
            next(stream)
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="The server ends"):
                list(stream)
        out, err = process.communicate(timeout=60)
    finally:
        end.cancel()
        process.kill()
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err and "secret-1" not in "".join(lines) + err
