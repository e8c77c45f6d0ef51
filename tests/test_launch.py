"""launch.py before any set-up: old Pythons, options, what the machine has, what is printed.

Set-ups and starts with real processes are in `tests/launch`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def launch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_under_test", ROOT / "launch.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout in which nothing is set up."""
    root = tmp_path / "checkout"
    (root / "localmoe").mkdir(parents=True)
    (root / "localmoe" / "__init__.py").write_text('__version__ = "9.8.7"\n')
    shutil.copy(ROOT / "launch.py", root / "launch.py")
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(root / "launch.py"), *arguments]
    environment = {**os.environ, "LOCALMOE_HOME": str(root.parent / "home")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_an_old_python_can_read_the_file() -> None:
    ast.parse((ROOT / "launch.py").read_text(encoding="utf-8"), feature_version=(3, 6))


def test_only_the_standard_library_is_imported() -> None:
    tree = ast.parse((ROOT / "launch.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 4), (3, 13, 9)])
def test_the_supported_pythons_are_accepted(launch: ModuleType, version: tuple[int, int, int]) -> None:
    launch.check_python(version, is_64_bit=True)


@pytest.mark.parametrize(
    ("version", "is_64_bit", "said"),
    [((3, 10, 4), True, "3.10.4"), ((3, 14, 0), True, "3.14.0"), ((3, 12, 1), False, r"3.12.1 \(32-bit\)")],
)
def test_another_python_gets_one_sentence_with_the_version_to_install(
    launch: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int, int],
    is_64_bit: bool,
    said: str,
) -> None:
    monkeypatch.setattr(launch, "find_working", lambda _: "")
    with pytest.raises(
        launch.LaunchError, match=f"3.11 to 3.13 and this is Python {said}: install Python 3.13"
    ):
        launch.check_python(version, is_64_bit)


def test_a_suitable_python_on_the_machine_is_named(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launch, "find_working", lambda name: {"python3.12": "/opt/py/bin/python3.12"}.get(name, "")
    )
    with pytest.raises(launch.LaunchError, match=r"start it with /opt/py/bin/python3\.12 launch\.py"):
        launch.check_python((3, 9, 0), is_64_bit=True)


def test_help_and_version_work_before_any_set_up_and_write_nothing(bare: Path) -> None:
    done = run(bare, "--help")
    assert done.returncode == 0
    for option in ("--host", "--port", "--model", "--vram-budget", "--no-browser", "--version"):
        assert option in done.stdout
    assert run(bare, "test", "--help").stdout == done.stdout
    assert run(bare, "--version").stdout == "localmoe 9.8.7\n"
    assert not (bare / ".venv").exists()
    assert not (bare.parent / "home").exists()


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["--port", "70000"], ["--port", "x"], ["extra"]])
def test_a_wrong_option_is_a_usage_error_before_any_set_up(bare: Path, arguments: list[str]) -> None:
    done = run(bare, *arguments)
    assert done.returncode == 2
    assert "usage: launch.py" in done.stderr
    assert not (bare / ".venv").exists()


def test_without_a_venv_module_the_package_to_install_is_named(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        launch.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name
    )
    setup = launch.Setup(tmp_path, tmp_path / "home", {"app"}, "cpu")
    minor = sys.version_info[1]
    with pytest.raises(
        launch.LaunchError, match=rf"sudo apt install python3\.{minor}-venv\) and start again"
    ):
        setup.make_venv()


def test_a_folder_whose_name_is_no_unicode_gives_one_sentence(launch: ModuleType, tmp_path: Path) -> None:
    setup = launch.Setup(tmp_path / "\udcff", tmp_path / "home", {"app"}, "cpu")
    with pytest.raises(launch.LaunchError, match="no valid Unicode: rename or move the folder"):
        setup.make_venv()


@pytest.mark.parametrize("text", ["<<<<<<< HEAD\n", "", None])
def test_a_damaged_pyproject_gives_one_sentence(launch: ModuleType, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    setup = launch.Setup(tmp_path, tmp_path / "home", {"app"}, "cpu")
    with pytest.raises(
        launch.LaunchError, match=r"pyproject\.toml is damaged \(.+\): put localmoe's own back"
    ):
        setup.requirements()


@pytest.mark.skipif(os.name == "nt", reason="puts a shell script on the PATH")
def test_an_nvidia_gpu_is_seen_through_its_driver_or_its_tool(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LOCALMOE_TORCH", raising=False)
    files: set[str] = set()
    monkeypatch.setattr(launch.os.path, "exists", lambda path: path in files)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert launch.wanted_torch("Linux") == "cpu", "a tool without a GPU is no GPU"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA GeForce RTX 4060 (UUID: GPU-1)'\n")
    assert launch.wanted_torch("Linux") == "cuda"
    assert launch.wanted_torch("Darwin") == "cpu"
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    files.add("/dev/nvidia0")
    assert launch.wanted_torch("Linux") == "cuda"
    assert launch.wanted_torch("Windows") == "cpu"
    monkeypatch.setenv("SYSTEMROOT", "W")
    files.add(os.path.join("W", "System32", "nvcuda.dll"))
    assert launch.wanted_torch("Windows") == "cuda"


def test_the_build_of_torch_can_be_forced_and_a_wrong_word_is_refused(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_TORCH", "cuda")
    assert launch.wanted_torch("Linux") == "cuda"
    monkeypatch.setenv("LOCALMOE_TORCH", "rocm")
    with pytest.raises(launch.LaunchError, match="set it to cpu or cuda"):
        launch.wanted_torch("Linux")


def test_windows_takes_cuda_from_pytorchs_index_and_macos_never_asks_it(launch: ModuleType) -> None:
    (first, _), (last, notice) = launch.torch_attempts("Windows", "cuda", "I")
    assert first == ["torch==2.13.0+cu130", *first[1:-1], "I/cu130"] and "--index-url" in first
    assert last == ["torch==2.13.0"] and notice
    assert launch.torch_attempts("Windows", "cpu", "I") == [(["torch==2.13.0"], "")]
    assert launch.torch_attempts("Darwin", "cpu", "I") == [(["torch==2.13.0"], "")]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("Collecting rich>=13\n  Using cached rich-13.whl (240 kB)\n", "looking up rich"),
        (
            "Collecting torch\n  Downloading https://h/torch-2.13.0-cp311.whl (831.2 MB)\n",
            "downloading torch (831.2 MB)",
        ),
        ("Installing collected packages: a, b, c\n", "unpacking 3 packages"),
        ("", ""),
    ],
)
def test_progress_says_what_pip_is_at(launch: ModuleType, output: str, said: str) -> None:
    assert launch.describe(output) == said


def test_without_a_terminal_progress_is_a_line_a_step_not_a_line_a_tick(
    launch: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = launch.Progress(4)
    progress.next("Making .venv")
    for _ in range(50):
        progress.show("busy")
    progress.next("PyTorch")
    assert capsys.readouterr().out.splitlines() == ["[1/4] Making .venv (0:00)", "[2/4] PyTorch (0:00)"]


def test_a_home_of_nobody_and_a_note_that_is_nested_too_deep_are_no_tracebacks(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", "~nosuchuser/x")
    assert launch.home_folder().name == "x"
    (tmp_path / "server.json").write_text("[" * 100_000)
    assert launch.read_json(tmp_path / "server.json") == {}
