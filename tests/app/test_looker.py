"""What models here need, asked of a process that may hang, grow or die: what that costs, and whom."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from app_process import wait_for
from hardware.example_models import QWEN

from app.models.finder import Failure
from app.models.looker import Looker, offline_environment
from app.models.shelf import ASK_AGAIN_S, Shelf, ShelfView
from localmoe.core.model_facts import ModelFacts
from localmoe.hub.catalogue import LocalModel

FACTS = ModelFacts(QWEN, 2, 100)
# stands in for cli.hub_process: a model's name says what its config does
PROCESS = f"""
import json, os, pathlib, sys, time
from localmoe.core.types import ModelFootprint
from localmoe.core.model_facts import ModelFacts
asked = pathlib.Path(sys.argv[1])
def note(text):
    with asked.open("a") as file:
        file.write(text + "\\n")
note("start")
for line in sys.stdin:
    message = json.loads(line)
    answer = {{"id": message["id"], "result": None}}
    if message["do"] == "local_facts":
        model = message["with"]["model"]
        note(model)
        if model == "hangs":
            time.sleep(60)
        elif model == "grows":
            held = bytearray(128 << 20)
            time.sleep(60)
        elif model == "dies":
            os.kill(os.getpid(), 9)
        elif model == "dies in its answer":
            print('{{"id": 1, "resu', end="", flush=True)
            os._exit(0)
        elif model == "refused":
            answer = {{"id": message["id"], "error": {{"kind": "UnsupportedModelError", "text": "No."}}}}
        else:
            answer["result"] = {FACTS.as_dict()!r}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Lines: each start of a process, and each model that one was asked about."""
    return tmp_path / "asked"


@pytest.fixture
def looker(tmp_path: Path, asked: Path) -> Iterator[Looker]:
    (tmp_path / "process.py").write_text(PROCESS, encoding="utf-8")
    command = (sys.executable, str(tmp_path / "process.py"), str(asked))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    made = Looker(environment, command, look_s=1.4, most_bytes=64 << 20)
    yield made
    made.close()


def listed(tmp_path: Path, *names: str) -> list[LocalModel]:
    return [LocalModel(name, tmp_path / name, 100, "qwen2_moe", (), "localmoe") for name in names]


def entries(asked: Path) -> list[str]:
    return asked.read_text().splitlines() if asked.exists() else []


def test_a_process_that_hangs_grows_or_dies_costs_one_model_its_facts_and_says_so(
    tmp_path: Path, looker: Looker, asked: Path
) -> None:
    bad = ["hangs", "grows", "dies", "dies in its answer"]
    models = listed(tmp_path, "org/a", *bad, "refused", "org/b")
    now = 0.0
    shelf = Shelf(looker.facts, lambda: models, lambda: now)

    def look() -> ShelfView:
        shelf.refresh(closely=True)
        wait_for(lambda: not shelf.moves(), 10, "every answer")
        return shelf.view()

    view = look()
    assert view.facts_of("org/a") == view.facts_of("org/b") == FACTS
    assert view.facts_of("refused") == Failure("UnsupportedModelError", "No.")
    said = {name: found.text for name in bad if isinstance(found := view.facts_of(name), Failure)}
    assert "hangs took more than 1 s" in said["hangs"] and "config.json" in said["hangs"]
    assert "grows took more than 64.0 MiB of RAM" in said["grows"]
    assert "looked at dies failed" in said["dies"] and "looked at dies in its answer failed" in said[bad[3]]
    each_with_its_own = [line for name in bad for line in (name, "start")]
    assert entries(asked) == ["start", "org/a", *each_with_its_own, "refused", "org/b"]
    asked.unlink()
    look()
    assert entries(asked) == []
    models[2] = replace(models[2], num_bytes=7)  # downloaded again
    look()
    assert entries(asked) == ["grows"]
    asked.unlink()
    now = ASK_AGAIN_S  # who fell to something else than its config is not left without for ever
    look()
    assert [name for name in entries(asked) if name != "start"] == bad


def test_the_list_moves_on_while_an_answer_is_waited_for(tmp_path: Path) -> None:
    models, answer, asked = listed(tmp_path, "org/slow"), threading.Event(), []

    def facts(name: str) -> ModelFacts:
        asked.append(name)
        assert answer.wait(10)
        return FACTS

    shelf = Shelf(facts, lambda: list(models))
    shelf.refresh(closely=True)
    wait_for(lambda: asked == ["org/slow"], what="the question")
    models += listed(tmp_path, "org/new")
    shelf.refresh()
    wait_for(lambda: len(shelf.view().models) == 2, 2, "the new model in the list")
    del models[0]
    shelf.refresh()
    wait_for(lambda: [one.name for one in shelf.view().models] == ["org/new"], 2, "a list without the other")
    assert shelf.moves() and asked == ["org/slow"]
    answer.set()
    wait_for(lambda: not shelf.moves(), what="the answers")
    assert asked == ["org/slow", "org/new"] and shelf.view().facts == (("org/new", FACTS),)


def test_models_are_looked_at_ahead_in_the_first_quiet_moment(tmp_path: Path) -> None:
    quiet, asked = threading.Event(), []

    def facts(name: str) -> ModelFacts:
        asked.append(name)
        return FACTS

    shelf = Shelf(facts, lambda: listed(tmp_path, "org/a"))
    shelf.refresh()
    shelf.look_ahead(quiet.is_set)
    wait_for(lambda: shelf.view().models and not shelf.moves(), what="the list")
    assert asked == []
    quiet.set()
    wait_for(lambda: shelf.view().facts_of("org/a") == FACTS, what="the facts")
    shelf.refresh(closely=True)
    wait_for(lambda: not shelf.moves())
    assert asked == ["org/a"]


def test_the_end_of_the_page_waits_for_no_answer(tmp_path: Path, looker: Looker, asked: Path) -> None:
    shelf = Shelf(looker.facts, lambda: listed(tmp_path, "hangs", "org/a"))
    shelf.refresh(closely=True)
    wait_for(lambda: "hangs" in entries(asked), what="the question")
    process = looker._client._process
    shelf.close()
    looker.close()
    assert process is not None and process.popen.returncode is not None
    wait_for(lambda: not shelf.moves(), what="its end")
    assert "org/a" not in entries(asked)


def test_the_process_is_offline_whatever_the_users_environment_says() -> None:
    assert (
        offline_environment({"HF_HUB_OFFLINE": "0", "X": "y"}).items()
        >= {"HF_HUB_OFFLINE": "1", "X": "y"}.items()
    )
