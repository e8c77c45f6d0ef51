"""--own-sampling: what the model's makers recommend, under the options that are given; and --thinking."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from localmoe.cli.main import main
from localmoe.core.config import GenerationRequest, SamplingConfig, Thinking
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.engine import Engine
from localmoe.server import serving
from localmoe.server.settings import ServerSettings

OWN = SamplingConfig(temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.05)
NOTHING = "scripted recommends no sampling: answers are as without --own-sampling."


class Recorder:
    """Answers nothing, and notes how it was asked to choose."""

    def __init__(self, own: SamplingConfig | None) -> None:
        self.own = own
        self.asked: list[SamplingConfig] = []
        self.thoughts: list[Thinking] = []
        self.captures = SimpleNamespace(begin=lambda sampling=None: None)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def info(self) -> Any:
        return SimpleNamespace(
            name="scripted", link="memory copy", context=64, own_sampling=self.own, thinking=("off", "on")
        )

    def stream(self, request: GenerationRequest, stop: object = None) -> Iterator[StreamEvent]:
        self.asked.append(request.sampling)
        self.thoughts.append(request.thinking)
        yield StreamEvent("", (1,), 0, "stop", GenerationCounters(prompt_tokens=3, new_tokens=1).freeze())


def asked(
    monkeypatch: pytest.MonkeyPatch, command: str, own: SamplingConfig | None, *options: str
) -> Recorder:
    """How every answer of this command would be asked for (of serve: the defaults of its requests)."""
    recorder = Recorder(own)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: recorder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/new\nHello again\n"))

    def serve(engine: Recorder, sock: object, settings: ServerSettings, ready: object) -> None:
        engine.asked.append(settings.sampling)
        engine.thoughts.append(settings.thinking)

    monkeypatch.setattr(serving, "serve", serve)
    more = {"generate": ("--prompt", "Hello"), "serve": ("--port", "0")}
    assert main([command, "scripted", *more.get(command, ()), *options]) == 0
    return recorder


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize(
    ("own", "options", "wanted"),
    [
        (OWN, (), SamplingConfig()),
        (OWN, ("--top-k", "5", "--seed", "3"), SamplingConfig(top_k=5, seed=3)),
        (OWN, ("--own-sampling",), OWN),
        (
            OWN,
            ("--own-sampling", "--top-k", "0", "--seed", "0"),
            SamplingConfig(0.7, 0.9, repetition_penalty=1.05, seed=0),
        ),
        (
            OWN,
            ("--temperature", "0", "--own-sampling"),
            SamplingConfig(0.0, 0.9, 20, repetition_penalty=1.05),
        ),
        (None, ("--own-sampling",), SamplingConfig()),
        (None, ("--own-sampling", "--temperature", "0.5"), SamplingConfig(0.5)),
    ],
)  # fmt: skip
def test_the_makers_own_sampling_holds_where_it_is_wished_for_and_no_option_is_given(
    command: str, own: SamplingConfig | None, options: tuple[str, ...], wanted: SamplingConfig,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = asked(monkeypatch, command, own, *options).asked
    assert found == [wanted] * (2 if command == "chat" else 1)
    said = [line for line in capsys.readouterr().err.splitlines() if "recommends" in line]
    assert said == ([NOTHING] if own is None else [])


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize("thinking", ["auto", "off", "high"])
def test_thoughts_are_asked_for_as_wished_and_what_the_model_does_not_know_is_said(
    command: str, thinking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = () if thinking == "auto" else ("--thinking", thinking)
    found = asked(monkeypatch, command, None, *options).thoughts
    assert found == [thinking] * (2 if command == "chat" else 1)
    said = [line for line in capsys.readouterr().err.splitlines() if "--thinking" in line]
    assert [("high" in line, "off, on" in line) for line in said] == [(True, True)] * (thinking == "high")


def test_the_embedded_models_own_sampling_gives_what_its_numbers_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def tokens(*options: str) -> list[int]:
        argv = ("generate", "demo", "--prompt", "Tell me a story", "--json", "--max-new-tokens", "12")
        assert main([*argv, "--device", "cpu", "--draft-length", "0", "--seed", "3", *options]) == 0
        return list(json.loads(capsys.readouterr().out)["token_ids"])

    own = tokens("--own-sampling")
    assert own == tokens("--temperature", "0.7", "--top-p", "0.9") != tokens("--own-sampling", "--top-k", "1")
