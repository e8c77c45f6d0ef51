"""Real set-ups: fresh, broken off, at the same time, offline, with a full disk, and which torch they take.

Does not test the app that runs afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from launch_checkout import Checkout, FirstStarts, make_index

pytestmark = pytest.mark.skipif(os.name == "nt", reason="drives POSIX signals")


def closed_port_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/simple"


def remove_package(checkout: Checkout, name: str) -> None:
    for path in checkout.root.glob(f".venv/lib/python*/site-packages/{name}*"):
        shutil.rmtree(path)


def torch_in(checkout: Checkout) -> list[str]:
    return sorted(p.name for p in checkout.root.glob(".venv/lib/python*/site-packages/torch-*"))


def setup_of(launch: ModuleType, checkout: Checkout, torch: str = "cpu"):  # type: ignore[no-untyped-def]
    return launch.Setup(checkout.root, checkout.home, {"app"}, torch)


def test_a_fresh_start_makes_venv_installs_and_serves_the_page(first_starts: FirstStarts) -> None:
    output = first_starts.first.output
    steps = [output.index(f"[{n}/4]") for n in (1, 2, 3, 4)]
    assert steps == sorted(steps)
    assert "localmoe is ready at http://127.0.0.1:" in output
    assert output.count("\n") < 20, "pip's lines belong in the log"


def test_a_set_up_killed_in_mid_way_is_not_taken_for_a_whole_one(first_starts: FirstStarts) -> None:
    assert first_starts.half_made
    assert "the last set-up was not finished" in first_starts.first.output
    assert "-m venv --clear" in first_starts.log


def test_of_two_starts_at_once_one_installs_and_the_other_waits_and_opens_it(
    first_starts: FirstStarts,
) -> None:
    assert "Another start is setting up" in first_starts.second.output
    assert "[1/4]" not in first_starts.second.output
    assert "already running at" in first_starts.second.output
    assert first_starts.exit_codes == (0, 0)
    assert first_starts.log.count("-m pip install") == 2


@pytest.mark.slow
def test_a_set_up_whose_launcher_alone_was_killed_is_waited_for(ready: Checkout, tmp_path: Path) -> None:
    building = tmp_path / "building"
    killed = ready.start("test", FAKE_SLOW_BUILD=str(building))
    try:
        deadline = time.monotonic() + 60
        while not building.exists():
            assert killed.process.poll() is None and time.monotonic() < deadline, killed.output
            time.sleep(0.02)
        killed.end(signal.SIGKILL)  # its pip lives on
        second = ready.start("test")
        second.wait_for("Another start is setting up")
        assert "Setting up" not in second.output
    finally:
        building.unlink(missing_ok=True)
    assert second.exit_code(timeout_s=60) == 0, second.output
    assert "Setting up localmoe" in second.output, "what nobody checked is not taken for whole"


@pytest.mark.slow
def test_a_checkout_that_was_copied_is_set_up_anew(ready: Checkout, tmp_path: Path) -> None:
    copy = Checkout(tmp_path / "other" / "copy", ready.home, ready.wheels)
    shutil.copytree(ready.root, copy.root, symlinks=True)
    run = copy.run("test")
    assert run.exit_code() == 0, run.output
    assert f"the folder was moved or copied from {ready.root}" in run.output
    (link,) = copy.root.glob(".venv/lib/python*/site-packages/localmoe.pth")
    assert link.read_text() == f"{copy.root}\n"
    assert f"{copy.root}/.venv/bin/python" in (copy.root / ".venv" / "bin" / "pip").read_text()
    assert "Setting up" not in copy.run("test").output


def test_a_move_is_told_from_another_way_to_the_same_folder(
    ready: Checkout, launch: ModuleType, tmp_path: Path
) -> None:
    stamp, alias = ready.root / ".venv" / "localmoe-setup.json", tmp_path / "alias"
    alias.symlink_to(ready.root)
    assert launch.Setup(alias, ready.home, {"app"}, "cpu").why_not_ready() == ""
    sharing = tmp_path / "sharing"  # a second checkout that uses the .venv of the first
    sharing.mkdir()
    shutil.copy(ready.root / "pyproject.toml", sharing)
    (sharing / ".venv").symlink_to(ready.root / ".venv")
    assert launch.Setup(sharing, ready.home, {"app"}, "cpu").why_not_ready() == ""
    older = {name: value for name, value in json.loads(stamp.read_text()).items() if name != "root"}
    stamp.write_text(json.dumps(older))
    assert setup_of(launch, ready).why_not_ready() == ""
    moved = ready.root.rename(tmp_path / "moved")
    assert launch.Setup(moved, ready.home, {"app"}, "cpu").why_not_ready() == "", "no place is noted"
    stamp = moved / ".venv" / "localmoe-setup.json"
    stamp.write_text(json.dumps({**older, "root": str(ready.root)}))
    assert "moved or copied from" in launch.Setup(moved, ready.home, {"app"}, "cpu").why_not_ready()


@pytest.mark.parametrize(
    "damage", [{"extras": 5}, {"packages": "torch"}, {"packages": [7]}, {"extras": None}]
)
def test_a_stamp_that_is_none_counts_as_no_set_up(
    ready: Checkout, launch: ModuleType, damage: dict[str, object]
) -> None:
    stamp = ready.root / ".venv" / "localmoe-setup.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), **damage}))
    assert setup_of(launch, ready).why_not_ready() == "the last set-up was not finished"


def test_a_new_set_up_after_a_move_that_was_broken_off_is_still_made(
    ready: Checkout, launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = launch.Setup(ready.root.rename(tmp_path / "moved"), ready.home, {"app"}, "cpu")
    monkeypatch.setattr(launch.Setup, "make_venv", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        moved.ensure()
    assert moved.why_not_ready() == "the last set-up was not finished"
    assert moved.venv_version() == "", "the old one is not worked on"


def test_the_cpu_build_in_pips_own_sources_is_taken(first_starts: FirstStarts) -> None:
    assert torch_in(first_starts.checkout) == ["torch-2.13.0+cpu.dist-info"]
    assert "--index-url" not in first_starts.log


def test_the_test_command_adds_the_dev_packages_and_passes_arguments_and_exit_code_on(
    ready: Checkout,
) -> None:
    run = ready.run("test", "-k", "some thing", "--maxfail=1", FAKE_PYTEST_EXIT="5")
    assert "more packages are needed" in run.output
    assert "pytest ran with ['-k', 'some thing', '--maxfail=1']" in run.output
    assert run.exit_code() == 5
    again = ready.run("test")
    assert "Setting up" not in again.output
    assert again.exit_code() == 0


def test_without_a_network_one_sentence_says_so_and_the_next_try_goes_on(ready: Checkout) -> None:
    (ready.root / ".venv" / "localmoe-setup.json").unlink()
    remove_package(ready, "torch")
    offline = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": closed_port_url()}
    run = ready.run("test", PIP_RETRIES="1", **offline)
    assert run.exit_code() == 1
    last = run.output.splitlines()[-1]
    assert "no package index answers: connect to the network and start again" in last
    assert str(ready.home / "logs" / "setup.log") in last
    assert "Traceback" not in run.output
    assert "--index-url" not in (ready.home / "logs" / "setup.log").read_text()
    again = ready.run("test")
    assert again.exit_code() == 0, again.output
    assert "-m venv" not in (ready.home / "logs" / "setup.log").read_text(), "the good .venv is kept"


@pytest.mark.slow
def test_a_disk_that_fills_up_gives_one_sentence_and_leaves_no_whole_set_up(ready: Checkout) -> None:
    run = ready.run("test", FAKE_DISK_FULL="1")
    assert run.exit_code() == 1
    assert "filled the disk: free some space for" in run.output.splitlines()[-1]
    assert not (ready.root / ".venv" / "localmoe-setup.json").exists()


def test_too_small_a_disk_is_refused_before_anything_is_written(
    ready: Checkout, launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(ready.root / ".venv")
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: SimpleNamespace(free=2_500_000_000))
    with pytest.raises(launch.LaunchError, match=r"2\.5 GB free and the set-up needs about 3\.0 GB"):
        setup_of(launch, ready).ensure()
    with pytest.raises(launch.LaunchError, match=r"about 10\.0 GB"):
        setup_of(launch, ready, "cuda").ensure()
    assert not (ready.root / ".venv").exists()


def test_what_a_broken_off_set_up_wrote_counts_towards_the_space_it_needs(
    ready: Checkout, launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (ready.root / ".venv" / "big").open("wb") as file:
        file.truncate(1_900_000_000)  # sparse: takes no room
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_200_000_000))
    setup_of(launch, ready).check_space("cpu")
    with pytest.raises(launch.LaunchError):
        setup_of(launch, ready).check_space("cuda")


def test_only_what_decides_the_packages_leads_to_a_new_set_up(ready: Checkout, launch: ModuleType) -> None:
    setup, pyproject = setup_of(launch, ready), ready.root / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(text.replace("line-length = 110", "line-length = 90"))
    assert setup.why_not_ready() == ""
    pyproject.write_text(text.replace("torch>=2.11", "torch>=2.12"))
    assert setup.why_not_ready() == "the requirements have changed"


def test_a_damaged_venv_is_noticed(ready: Checkout, launch: ModuleType) -> None:
    setup = setup_of(launch, ready)
    assert setup.why_not_ready() == ""
    assert setup_of(launch, ready, "cuda").why_not_ready() == "an NVIDIA GPU is seen now"
    remove_package(ready, "torch")
    assert setup.why_not_ready() == "torch is missing"
    (ready.root / ".venv" / "bin" / "python").unlink()
    assert setup.why_not_ready() == "the Python of .venv has changed"
    (ready.root / ".venv" / "localmoe-setup.json").write_text('{"fingerprint": ')
    assert setup.why_not_ready() == "the last set-up was not finished"


def install_torch(
    launch: ModuleType, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, kind: str, **env: str
) -> list[str]:
    """The torch that a set-up takes from these sources, on a machine of this kind."""
    for name, value in checkout.env(PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_RETRIES="0", **env).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.platform, "system", lambda: "Linux")
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    remove_package(checkout, "torch")
    setup = setup_of(launch, checkout, kind)
    setup.log.parent.mkdir(parents=True, exist_ok=True)
    setup.install_torch()
    return torch_in(checkout)


def test_a_machine_without_a_gpu_takes_the_cpu_build_from_pytorchs_index_rather_than_cuda(
    ready: Checkout, launch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_index(tmp_path / "pytorch" / "cpu", "2.13.0+cpu")
    sources = {
        "PIP_INDEX_URL": make_index(tmp_path / "main", "2.12.0", "2.13.0"),
        "LOCALMOE_TORCH_INDEX": (tmp_path / "pytorch").as_uri(),
    }
    taken = install_torch(launch, ready, monkeypatch, "cpu", **sources)
    assert taken == ["torch-2.13.0+cpu.dist-info"]


@pytest.mark.slow
def test_when_pytorchs_index_does_not_answer_the_standard_build_is_taken_with_a_notice(
    ready: Checkout,
    launch: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = {
        "PIP_INDEX_URL": make_index(tmp_path / "main", "2.13.0"),
        "LOCALMOE_TORCH_INDEX": closed_port_url(),
    }
    assert install_torch(launch, ready, monkeypatch, "cpu", **sources) == ["torch-2.13.0.dist-info"]
    assert "CPU builds cannot be reached" in capsys.readouterr().out


def test_a_machine_with_a_gpu_does_not_take_the_cpu_build(
    ready: Checkout, launch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = {"PIP_INDEX_URL": make_index(tmp_path / "main", "2.13.0+cpu", "2.13.0")}
    assert install_torch(launch, ready, monkeypatch, "cuda", **sources) == ["torch-2.13.0.dist-info"]


@pytest.mark.slow
def test_a_system_without_a_build_is_told_so(
    ready: Checkout, launch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = {"PIP_INDEX_URL": make_index(tmp_path / "main", "1.0"), "LOCALMOE_TORCH_INDEX": "file:///none"}
    with pytest.raises(
        launch.LaunchError, match=r"No package index that answers has PyTorch 2\.13\.0 for Linux"
    ):
        install_torch(launch, ready, monkeypatch, "cpu", **sources)
