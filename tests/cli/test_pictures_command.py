"""Pictures on the command line and in a conversation there."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import ask
from support.vision_models import picture, shown, vision_model, write_vision_model

from localmoe.cli import chat
from localmoe.cli.chat import Conversation
from localmoe.cli.main import main
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.types import Message
from localmoe.engine import Engine

TOKENS = 6
OPTIONS = ("--device", "cpu", "--max-new-tokens", str(TOKENS), "--draft-length", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("cli") / "reads", vision_model("qwen3_vl_moe"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "one.png", tmp_path / "two.png"
    for seed, file in enumerate(made):
        file.write_bytes(picture(seed))
    return made


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([*words, *OPTIONS])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_generate_shows_pictures_before_the_prompt(
    folder: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    named = [word for file in files for word in ("--image", str(file))]
    code, out, _ = run(capsys, "generate", str(folder), "--prompt", "which", *named, "--json")
    told: Any = json.loads(out)
    with Engine.load(str(folder), EngineConfig(device="cpu", draft_length=0)) as engine:
        wanted = ask(engine, [shown("which", (0, picture(0)), (0, picture(1)))], TOKENS)
    assert code == 0 and told["token_ids"] == wanted.tokens and told["prompt_token_ids"] == wanted.prompt


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--image", "nowhere.png"], "Picture nowhere.png cannot be read: No such file or directory."),
        (["--image", __file__], "It is no picture that can be read"),
        (["--image", "ONE", "--raw"], "A raw prompt has no place for pictures"),
        (["--image", "ONE"], "This model reads no pictures"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_sentence(
    words: list[str], sentence: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(files[0]) if word == "ONE" else word for word in words]
    code, out, err = run(capsys, "generate", "demo", "--prompt", "which", *words)
    assert (code, out) == (1, "") and sentence in err and "Traceback" not in err


def test_a_conversation_shows_pictures_with_the_next_question(
    folder: Path,
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = f"/image {files[0]}\nwhich\n/image nowhere.png\nand now\n/image {files[1]}\n/new\nwhich"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    code, out, err = run(capsys, "chat", str(folder))
    with Engine.load(str(folder), EngineConfig(device="cpu", draft_length=0)) as engine:
        told = [shown("which", (0, picture(0)))]
        first = ask(engine, told, TOKENS).text
        told += [Message("assistant", first), shown("and now")]
        second = ask(engine, told, TOKENS).text
        alone = ask(engine, [shown("which")], TOKENS).text
    assert code == 0 and out == f"{first}\n{second}\n{alone}\n"
    assert f"{files[0]} goes with the next question." in err and "Picture nowhere.png cannot be read" in err


def test_a_model_that_reads_none_says_so(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {files[0]}\n/image \nhello"))
    code, out, err = run(capsys, "chat", "demo")
    assert code == 0 and out.count("\n") == 1 and "reads no pictures: ask without them" in err
    assert "Name the picture's file: /image FILE." in err, "it is no question"


class Stopped:
    """Whose first answer is stopped before it says anything."""

    def __init__(self) -> None:
        self.asked: list[tuple[Message, ...]] = []

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(reads_images=True, link="")

    def stream(self, request: GenerationRequest, stop: threading.Event) -> Iterator[SimpleNamespace]:
        self.asked.append(request.messages)
        text = "a cat" if len(self.asked) > 1 else ""
        yield SimpleNamespace(text=text, stats=None, opens_reasoning=False)


def test_a_picture_of_an_answer_that_was_stopped_goes_with_the_next_question(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "answer_line", lambda stats, link: "")
    engine: Any = Stopped()
    conversation = Conversation(engine, GenerationRequest(messages=(Message("user", ""),)))
    conversation.show(files[0])
    for question in ("what", "what is it", "and now"):
        conversation.ask(question)
    first, second, third = engine.asked
    assert first[0].images == second[0].images != () and len(first) == len(second) == 1
    assert third[:2] == (second[0], Message("assistant", "a cat")) and third[2].images == ()
