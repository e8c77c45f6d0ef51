"""A small checkout with a real launch.py, so that real set-ups run offline in seconds; decides no outcome.

Its app, its build backend and its packages (a `torch` and a `pytest` of one file each) are made here.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parents[1] / "launch.py"
PYPROJECT = """
[build-system]
requires = []
build-backend = "fake_backend"
backend-path = ["."]
[project]
name = "localmoe"
version = "9.8.7"
dependencies = ["torch>=2.11,<3"]
[project.optional-dependencies]
app = []
dev = ["pytest"]
[tool.ruff]
line-length = 110
"""
FAKE_PYTEST = """
import os, sys
print("pytest ran with", sys.argv[1:], flush=True)
sys.exit(int(os.environ.get("FAKE_PYTEST_EXIT", "0")))
"""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A wheel that pip installs without building anything."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"]))
    return path


def make_index(folder: Path, *torch_versions: str) -> str:
    """The address of a package index on disk that holds these versions of torch."""
    wheels = [make_wheel(folder / "torch", "torch", v, {"torch/__init__.py": ""}) for v in torch_versions]
    links = "".join(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>' for wheel in wheels)
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder.as_uri()


def free_port() -> int:
    """A port with free neighbours, below the range that the system hands out itself."""
    for port in range(20000 + os.getpid() % 8000, 31000):
        try:
            for near in range(port, port + 4):
                with socket.create_server(("127.0.0.1", near)):
                    pass
        except OSError:
            continue
        return port
    raise AssertionError("no free port")


class Running:
    """A started launch.py whose printed lines can be waited for."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.began, self.lines = time.monotonic(), list[str]()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 60) -> float:
        """Seconds from the start to the line that holds the text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline and self.reader.is_alive(), f"no '{text}' in:\n{self.output}"
            time.sleep(0.02)
        return time.monotonic() - self.began

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Sends the signal to launch.py alone and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.exit_code()

    def exit_code(self, timeout_s: float = 30) -> int:
        code = self.process.wait(timeout_s)
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@dataclass
class Checkout:
    """A folder with launch.py and a fake app, its home folder, and the starts made from it."""

    root: Path
    home: Path
    wheels: Path
    starts: list[Running] = field(default_factory=list)

    def env(self, **more: str) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "FAKE_", "LOCALMOE_", "PYTEST_"))
        }
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "COV_CORE_SOURCE"):
            kept.pop(name, None)
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        return {**kept, **pip, "LOCALMOE_HOME": str(self.home), "LOCALMOE_TORCH": "cpu", **more}

    def start(self, *arguments: str, **env: str) -> Running:
        command = [sys.executable, str(self.root / "launch.py"), *arguments]
        self.starts.append(Running(command, self.env(**env)))
        return self.starts[-1]

    def run(self, *arguments: str, **env: str) -> Running:
        """A start that has ended."""
        started = self.start(*arguments, **env)
        started.exit_code(timeout_s=60)
        return started

    def close(self) -> None:
        for start in self.starts:
            if start.process.poll() is None:
                start.process.send_signal(signal.SIGTERM)
        for start in self.starts:
            try:
                start.process.wait(20)
            except subprocess.TimeoutExpired:
                start.process.kill()
            start.exit_code()


def make_checkout(folder: Path) -> Checkout:
    root = folder / "checkout"
    for path, text in {
        "pyproject.toml": PYPROJECT,
        "localmoe/__init__.py": '__version__ = "9.8.7"\n',
        "app/__init__.py": "",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    shutil.copy(LAUNCH, root / "launch.py")
    shutil.copy(HERE / "fake_app.py", root / "app" / "__main__.py")
    shutil.copy(HERE / "fake_backend.py", root / "fake_backend.py")
    wheels = folder / "wheels"
    make_wheel(wheels, "torch", "2.13.0+cpu", {"torch/__init__.py": ""})
    make_wheel(wheels, "torch", "2.13.0", {"torch/__init__.py": ""})
    make_wheel(wheels, "pytest", "8.0", {"pytest/__init__.py": "", "pytest/__main__.py": FAKE_PYTEST})
    return Checkout(root, folder / "home", wheels)


@dataclass(frozen=True)
class FirstStarts:
    """What three starts of one fresh checkout did: one killed in mid-way, then two at the same time."""

    checkout: Checkout
    half_made: bool
    first: Running
    second: Running
    exit_codes: tuple[int, int]
    log: str
