"""What the commands say of models whose experts lie on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hub_home import REPO, hub_and_home
from support.hub_server import files_of

from localmoe.cli.main import main
from localmoe.core.config import EngineConfig
from localmoe.engine import fit as engine_fit
from localmoe.hardware.facts import Hardware

Tiny = Callable[[str], tuple[Path, Any]]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(out: str) -> dict[str, str]:
    """Of a table of pairs."""
    cells = [line.split("│") for line in out.splitlines() if line.count("│") > 2]
    return {name.strip(): value.strip() for _, name, value, *_ in cells}


def test_the_plan_says_what_ram_holds_of_the_file_and_predicts_no_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--device", "cpu", "--experts-on", "disk", "--ram-budget", "8MiB")
    said = rows(run(capsys, "plan", "demo", *options)[1])
    assert said["Experts in host RAM at a time"] == "52 of 96 (54 %)"
    assert said["Their file on the disk"].endswith("MiB")
    assert "read from the disk those that are not there" in said["Experts"]
    assert not any("Predicted" in name for name in said)
    report = json.loads(run(capsys, "plan", "demo", *options, "--json")[1])
    assert report["predicted"] is None and report["plan"]["ram_experts"] == 52
    assert "Predicted limit, on demand" in rows(run(capsys, "plan", "demo", "--device", "cpu")[1])


def test_of_a_download_that_ram_alone_refuses_it_is_said_that_it_runs_from_the_disk(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine_fit.divide_memory

    def with_little_ram(footprint: Any, *, hardware: Hardware, config: EngineConfig, **rest: Any) -> Any:
        little = replace(hardware, ram_available_bytes=1 << 20) if config.experts_on == "ram" else hardware
        return whole(footprint, hardware=little, config=config, **rest)

    monkeypatch.setattr(engine_fit, "divide_memory", with_little_ram)
    with hub_and_home(tmp_path) as hub:
        hub.commit(REPO, files_of(tiny("qwen2_moe")[0]))
        code, out, err = run(capsys, "pull", REPO, "--plan")
    said = rows(out)
    assert code == 1 and said["Fits"] == "no" and said["With --experts-on disk"] == "yes, slower"
    assert said["experts' file"].endswith("iB") and "100 % of the experts" in said["RAM"]
    assert "of host RAM" in err


def test_the_list_says_what_was_made_of_each_model_and_of_others_and_rm_deletes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("demo", "gone"):
        home = tmp_path / f"drafts/{name}-0123456789ab"
        home.mkdir(parents=True)
        (home / "experts-bf12-bfloat16.records").write_bytes(bytes(3 << 20))
    out = run(capsys, "models")[1]
    assert "made of it" in out and out.count("3.0 MiB") == 2 and "rm NAME --made" in out
    listed = json.loads(run(capsys, "models", "--json")[1])
    assert [(one["name"], one["source"], one["made_bytes"]) for one in listed] == [
        ("demo", "demo", 3 << 20), ("gone", "made", 3 << 20),
    ]  # fmt: skip
    assert run(capsys, "rm", "demo", "--experts-file")[1] == "Freed 3.0 MiB.\n"
    assert run(capsys, "rm", "gone", "--made")[1] == "Freed 3.0 MiB.\n"
    assert list((tmp_path / "drafts").iterdir()) == []
