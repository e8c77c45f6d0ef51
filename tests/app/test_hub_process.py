"""The Hub's process and its client over real pipes and real HTTP: results, errors of their own class,
pausing, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from app_process import ROOT, wait_for
from support.hub_home import REPO, hub_and_home, small_model
from support.hub_server import HubServer, files_of

from app.models.finder import Finder
from app.models.hub_client import HubClient, HubProcessError, online_environment
from localmoe.cli.hub_process import HubProcess
from localmoe.core.errors import (
    DownloadCancelledError,
    GatedModelError,
    HubUnreachableError,
    RepoNotFoundError,
)
from localmoe.core.model_facts import ModelFacts
from localmoe.core.types import Progress
from localmoe.engine.facts import local_facts


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_and_home(tmp_path_factory.mktemp("hub-home")) as server:
        yield server


@pytest.fixture(scope="module")
def client(hub: HubServer) -> Iterator[HubClient]:
    """One process for all tests: starting it takes seconds."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    made = HubClient(online_environment(environment))
    yield made
    process = made._process
    made.close()
    assert process is None or process.popen.returncode == 0


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def home() -> Path:
    return Path(os.environ["LOCALMOE_HOME"])


def test_it_is_started_before_it_is_asked_and_asks_nobody(hub: HubServer, client: HubClient) -> None:
    client.prepare()
    wait_for(lambda: client._idle is not None, 30, "its libraries")
    process = client._process
    assert process is not None and hub.requests == []
    client.prepare()  # it runs already
    before = cpu_s(process.popen.pid)
    assert before > 1
    client.call("search", {"query": "org/"})
    assert cpu_s(process.popen.pid) - before < 1  # nothing is left to import
    assert client._process is process


def test_a_download_is_paused_at_the_byte_and_goes_on_while_questions_are_answered(
    hub: HubServer, client: HubClient, tiny16: Any
) -> None:
    files = {**files_of(tiny16("qwen2_moe")), "vocab.txt": b"v" * 10}
    hub.commit(REPO, files)
    total = len(files["model.safetensors"])
    hub.rate, cancel, seen = 1.5e6, threading.Event(), []

    def report(progress: Progress) -> None:
        seen.append(progress)
        if progress.done > total // 3 and len(seen) > 3 and not cancel.is_set():
            facts = client.call("repo_facts", {"repo_id": REPO})
            assert ModelFacts.from_dict(facts).footprint.num_experts == 8
            cancel.set()

    with pytest.raises(DownloadCancelledError):
        client.call("pull", {"repo_id": REPO}, progress=report, cancel=cancel)
    (part,) = (home() / "models" / ".org--moe.download").glob("model.safetensors.*")
    kept = part.stat().st_size
    assert 0 < kept < total and seen[-1].total > total
    hub.rate, hub.requests[:] = None, []
    assert client.call("pull", {"repo_id": REPO}) == str(home() / "models" / "org--moe")
    assert sum(one.sent for one in hub.bodies("model.safetensors")) == total - kept
    assert ModelFacts.from_dict(client.call("local_facts", {"model": REPO})) == local_facts(REPO)


def test_errors_come_back_as_what_they_are_and_nothing_is_printed(
    hub: HubServer, client: HubClient, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.commit("org/locked", small_model())
    hub.repos["org/locked"].gated = True
    for repo_id, kind in (("org/none", RepoNotFoundError), ("org/locked", GatedModelError)):
        with pytest.raises(kind, match=repo_id):
            client.call("repo_facts", {"repo_id": repo_id})
    with pytest.raises(HubProcessError, match="terminal"):
        client.call("no such action", {})
    assert capfd.readouterr().out == ""


def test_a_search_shows_hits_at_once_and_their_facts_when_they_come(
    hub: HubServer, client: HubClient, tiny16: Any
) -> None:
    hub.commit(REPO, files_of(tiny16("qwen2_moe")))
    hub.commit("org/find-moe", files_of(tiny16("qwen2_moe")))
    hub.commit("org/find-dense", {**small_model(), "config.json": b'{"model_type": "llama"}'})
    hub.commit("org/find-locked", files_of(tiny16("qwen2_moe")))
    hub.repos["org/find-locked"].gated = True
    finder = Finder(client.call)
    finder.search("find-")
    assert finder.view().phase == "searching"
    wait_for(lambda: len(finder.view().facts) == 2, 30, "the facts of both candidates")
    found = finder.view()
    assert [hit.repo_id for hit in found.hits][-1] == "org/find-dense" and len(found.hits) == 3
    assert finder.facts_of("org/find-moe") is not None
    assert getattr(found.facts["org/find-locked"], "kind", "") == "GatedModelError"
    hub.repos["org/find-locked"].gated = False
    finder.look_again("org/find-locked")
    wait_for(lambda: finder.facts_of("org/find-locked") is not None, 30, "another look")
    hub.api_faults.append(500)
    finder.search("find-")
    wait_for(lambda: finder.view().phase == "failed", 30)
    failure = finder.view().failure
    assert failure is not None and failure.kind == HubUnreachableError.__name__
    finder.search(f"{hub.url}/{REPO}/tree/main")
    wait_for(lambda: finder.facts_of(REPO) is not None, 30)


def test_a_process_that_is_killed_fails_its_calls_and_is_started_anew(
    hub: HubServer, client: HubClient
) -> None:
    hub.commit("org/slow", small_model(1 << 18))
    hub.on_file = lambda name: time.sleep(1.0) if name == "config.json" else None
    failed: list[str] = []

    def ask() -> None:
        with pytest.raises(HubProcessError) as error:
            client.call("repo_facts", {"repo_id": "org/slow"})
        failed.append(str(error.value))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: any("org/slow" in one.path for one in hub.requests), 20, "the question")
    process = client._process
    assert process is not None
    os.kill(process.popen.pid, signal.SIGKILL)
    thread.join(20)
    hub.on_file = lambda name: None
    assert len(failed) == 1 and "Try again" in failed[0]
    with pytest.raises(HubProcessError):
        client.call("no such action", {})
    assert client._process is not None and client._process is not process


def test_it_serves_lines_hears_cancels_and_ends_with_its_input() -> None:
    began = threading.Event()

    def wait(given: Mapping[str, Any], report: Any, cancel: threading.Event) -> Any:
        report(Progress("x", 1, 2, "bytes"))
        began.set()
        assert cancel.wait(10)
        return given["name"]

    def fail(given: Mapping[str, Any], report: Any, cancel: threading.Event) -> Any:
        raise ValueError("a fault inside")

    read, write = os.pipe()
    output = io.StringIO()

    def serve() -> None:
        with os.fdopen(read) as lines:
            HubProcess(output, {"wait": wait, "fail": fail}).serve(lines)

    served = threading.Thread(target=serve, daemon=True)
    served.start()
    with os.fdopen(write, "w") as lines:
        for message in (
            {"cancel": 77}, {"id": 1, "do": "wait", "with": {"name": "a"}},
            {"id": 2, "do": "fail", "with": {}},
            {"id": 3, "do": "wait", "with": {"name": "b"}}, {"cancel": 1},
        ):  # fmt: skip
            lines.write(json.dumps(message) + "\n")
        lines.flush()
        wait_for(lambda: '"id": 1, "result": "a"' in output.getvalue(), 10)
        time.sleep(0.05)
        assert '"result": "b"' not in output.getvalue()
    served.join(10)  # the end of the input cancels the other
    wait_for(lambda: '"id": 3, "result": "b"' in output.getvalue(), 10)
    answers = [json.loads(line) for line in output.getvalue().splitlines()]
    assert {"id": 2, "error": {"kind": "InternalError", "text": ""}} in answers
    assert [answer["progress"]["done"] for answer in answers if "progress" in answer] == [1, 1]
