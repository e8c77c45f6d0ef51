"""`localmoe pull` from a Hub on this machine: to a model that answers, killed and gone on with, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_home import REPO, hub_and_home, small_model
from support.hub_server import HubServer, files_of
from support.tiny_models import tied_model_storing

from localmoe.cli.main import main
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import DownloadCancelledError
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.engine import fit as engine_fit
from localmoe.engine.facts import repo_facts
from localmoe.engine.pulling import pull_model
from localmoe.hardware import probe
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.footprint import measure_footprint
from localmoe.model.skeleton import build_skeleton

Tiny = Callable[[str], tuple[Path, Any]]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        yield server


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence with which a command is refused."""
    code, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (1, "") and len(lines) == 1 and lines[0].startswith("localmoe: "), err
    return lines[0]


def start_pull(*options: str) -> subprocess.Popen[str]:
    """The command as a process of its own, in the environment of the test."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "localmoe.cli", "pull", REPO, *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
def test_a_pulled_model_is_listed_and_answers(
    hub: HubServer, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit(REPO, {**files_of(tiny("qwen2_moe")[0]), "README.md": b"# card"})
    code, out, err = run(capsys, "pull", REPO)
    assert (code, out) == (0, f"{tmp_path / 'models' / 'org--moe'}\n"), err
    listed = json.loads(run(capsys, "models", "--json")[1])
    assert ("org/moe", "localmoe", "qwen2_moe") in [
        (m["name"], m["source"], m["architecture"]) for m in listed
    ]
    config = EngineConfig(vram_budget_bytes=1 << 30, device="cpu")
    request = GenerationRequest(messages=(Message("user", "hello"),), max_new_tokens=4)
    answers = []
    for model in (REPO, str(tiny("qwen2_moe")[0])):
        with Engine.load(model, config) as engine:
            answers.append([token for event in engine.stream(request) for token in event.token_ids])
    assert len(answers[0]) == 4 and answers[0] == answers[1]
    assert run(capsys, "rm", REPO)[0] == 0 and not (tmp_path / "models" / "org--moe").exists()


def part_bytes(home: Path) -> int:
    """Bytes of the weight files that an unfinished pull has."""
    folder = home / "models" / ".org--moe.download"
    paths = [path for shard in SHARDS for path in folder.glob(f"{shard}.*")]
    return sum(path.stat().st_size for path in paths)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_only_the_missing_bytes_are_sent(
    hub: HubServer, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {**small_model(1 << 20), "config.json": (tiny("qwen2_moe")[0] / "config.json").read_bytes()}
    hub.commit(REPO, files)
    hub.rate = 2e6
    process = start_pull()
    wait_for(lambda: part_bytes(tmp_path) > 3_000_000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept, total = part_bytes(tmp_path), sum(len(files[shard]) for shard in SHARDS)
    assert 3_000_000 < kept < total
    assert "localmoe pull org/moe" in refused(capsys, "plan", REPO)  # half a model is none
    hub.rate, hub.requests[:] = None, []
    again = start_pull()
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert sum(one.sent for one in hub.bodies(".safetensors")) == total - kept
    assert all((Path(out.strip()) / shard).read_bytes() == files[shard] for shard in SHARDS)


@pytest.mark.slow
def test_interrupted_it_ends_with_130_and_a_second_one_meanwhile_with_1_and_nobody_else_is_asked(
    hub: HubServer, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {**small_model(1 << 20), "config.json": (tiny("qwen2_moe")[0] / "config.json").read_bytes()}
    hub.commit(REPO, files)
    hub.rate = 1e5  # so it is under way still when the second one has imported what it needs
    process = start_pull()
    wait_for(lambda: part_bytes(tmp_path) > 100_000)
    assert f"by process {process.pid}" in refused(capsys, "pull", REPO)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    # huggingface_hub would look up which program calls it, too
    assert hub.requests and {one.token for one in hub.requests} == {None}
    wanted = (f"/api/models/{REPO}", f"/{REPO}/resolve/")
    assert [one.path for one in hub.requests if one.server == "hub" and not one.path.startswith(wanted)] == []
    assert part_bytes(tmp_path) > 100_000
    code, out, _ = run(capsys, "pull", REPO, "--discard")
    assert code == 0 and "Freed" in out and "0 B" not in out
    assert list((tmp_path / "models").iterdir()) == []


def quantised(config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "gptq"}


def custom(config: dict[str, Any]) -> None:
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}


def unknown(config: dict[str, Any]) -> None:
    config["model_type"] = "no_such_moe"


def dense(config: dict[str, Any]) -> None:
    config.update(model_type="qwen2", num_experts=8)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (quantised, "quantised (gptq)"),
        (custom, "Python code of its own"),
        (unknown, "cannot build"),
        (dense, "dense"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_its_config(
    spoil: Callable[[dict[str, Any]], None],
    words: str,
    hub: HubServer,
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((tiny("qwen2_moe")[0] / "config.json").read_text())
    spoil(config)
    hub.commit(REPO, {**small_model(), "config.json": json.dumps(config).encode()})
    sentence = refused(capsys, "pull", REPO)
    assert words in sentence and REPO in sentence and "/tmp" not in sentence
    assert list((tmp_path / "models").iterdir()) == [] and not hub.bodies(".safetensors")


def test_bad_usage_and_what_is_not_there(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "pull")[0] == 2
    assert run(capsys, "pull", REPO, "--revision", "main", "--discard")[0] == 2
    assert "no model org/moe" in refused(capsys, "pull", REPO)
    assert "no repo id" in refused(capsys, "pull", "a/b/c")
    hub.commit(REPO, small_model())
    assert "no revision 'v9'" in refused(capsys, "pull", REPO, "--revision", "v9")


def test_whether_it_fits_is_said_before_anything_is_downloaded(
    hub: HubServer, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit(REPO, files_of(tiny("qwen2_moe")[0]))
    hub.repos[REPO].licence = "apache-2.0"
    code, out, err = run(capsys, "pull", REPO, "--plan")
    assert (code, err) == (0, "") and not hub.bodies(".safetensors")
    assert not (tmp_path / "models").exists() or list((tmp_path / "models").iterdir()) == []
    cells = [line.split("│") for line in out.splitlines() if line.count("│") > 2]
    said = {name.strip(): value.strip() for _, name, value, *_ in cells}
    assert (said["Fits"], said["Licence"]) == ("yes", "apache-2.0")
    assert said["Experts"] == "3 layers x 8, top 3"
    assert said["Download"].endswith("iB") and float(said["Predicted limit"].split()[0]) > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_fit, "DISK_MARGIN_BYTES", 1 << 60)
        code, out, err = run(capsys, "pull", REPO, "--plan")
    assert code == 1 and "│ no" in out
    assert "too little room for the download" in err and len(err.splitlines()) == 1
    assert run(capsys, "pull", REPO, "--plan", "--discard")[0] == 2
    assert "no model org/none" in refused(capsys, "pull", "org/none", "--plan")


def test_what_is_here_already_needs_no_room_on_the_disk(
    hub: HubServer,
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = files_of(tiny("qwen2_moe")[0])
    hub.commit(REPO, files)
    assert run(capsys, "pull", REPO)[0] == 0
    free = engine_fit.DISK_MARGIN_BYTES + 5_000  # for config and the like, and no weights
    monkeypatch.setattr(probe, "disk_free_bytes", lambda folder: free)
    assert run(capsys, "pull", REPO, "--plan")[0] == 0
    hub.commit(REPO, {**files, "chat_template.jinja": b"new"})
    code, _, err = run(capsys, "pull", REPO, "--plan")
    assert code == 1 and "too little room for the download" in err
    folder = tmp_path / "models" / "org--moe"
    folder.rename(folder.with_name(".org--moe.download"))  # as where the last file has not arrived yet
    assert run(capsys, "pull", REPO, "--plan")[0] == 0


@pytest.mark.parametrize("stored", ["two values", "the head alone"])
def test_two_tensors_that_the_config_calls_one_are_both_counted_before_a_download(
    stored: str, hub: HubServer, tmp_path: Path
) -> None:
    folder = tied_model_storing(tmp_path / "tied", stored)
    names = dict.fromkeys(Checkpoint.open(folder).tensors, "model.safetensors")
    index = json.dumps({"weight_map": names}).encode()
    hub.commit(REPO, {**files_of(folder), "model.safetensors.index.json": index})
    here = measure_footprint(REPO, torch.float32, build_skeleton(Checkpoint.open(folder), torch.float32))
    assert repo_facts(REPO).footprint.shared_params == here.shared_params


def test_a_user_who_wants_no_network_is_told_so(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(capsys, "pull", REPO)
    assert "HF_HUB_OFFLINE" in refused(capsys, "pull", REPO, "--plan")


def test_a_pull_is_cancelled_by_its_event_and_taken_up_again(hub: HubServer, tiny: Tiny) -> None:
    hub.commit(REPO, files_of(tiny("qwen2_moe")[0]))
    cancel = threading.Event()
    hub.on_file = lambda name: cancel.set() if name == "model.safetensors" else None
    hub.rate = 1e5
    with pytest.raises(DownloadCancelledError):
        pull_model(REPO, cancel=cancel)
    hub.on_file, hub.rate = lambda name: None, None
    assert (pull_model(REPO) / "model.safetensors").is_file()
