#!/usr/bin/env python3
"""Makes .venv, installs localmoe into it, starts the app, opens the browser; `launch.py test` runs the tests.

Standard library only, and in Python 3.6 syntax: an old Python prints a sentence instead of a SyntaxError.
It decides nothing about models, memory or the page: that is the app's part.
"""

import argparse
import contextlib
import errno
import hashlib
import http.client
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SUPPORTED = ((3, 11), (3, 12), (3, 13))
RECIPE = (
    1  # raise it when the set-up's steps change: every .venv is then brought up to date at its next start
)
TORCH, CUDA = "2.13.0", "cu130"
TORCH_INDEX = "https://download.pytorch.org/whl"
GB = 1000**3
SPACE = {"cpu": 3 * GB, "cuda": 10 * GB}  # bytes that a whole set-up takes, pip's copies included
HOST, PORT, PORTS_TRIED = "127.0.0.1", 7860, 50
PORT_TAKEN = 98  # the app's exit code when another program took the port first
GRACE_S = 15.0  # how long the app may take to stop before it is killed
WINDOWS = os.name == "nt"
STOP_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, n)]
NO_NETWORK = re.compile(
    "after connection broken by|Max retries exceeded|NewConnectionError|NameResolutionError|ReadTimeoutError"
    "|ConnectTimeoutError|ProxyError|SSLError|getaddrinfo failed|ConnectionResetError|IncompleteRead"
)
DISK_FULL = re.compile(r"No space left on device|\[Errno 28\]|WinError 112|Disk quota exceeded")
NO_MATCH = re.compile("No matching distribution found|Could not find a version that satisfies")


class LaunchError(Exception):
    """Something the user can mend, said in one sentence."""


def say(text: str) -> None:
    """Prints a line, if somebody takes it: a full disk, or a reader that went away, ends no start."""
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # for what is left in the buffer, and for the app
        os.close(nowhere)


# ---- what this machine has ----


def check_python(version: "tuple[int, ...]", is_64_bit: bool) -> None:
    """Refuses a Python that the packages have no builds for; `version` is (major, minor, patch)."""
    if version[:2] in SUPPORTED and is_64_bit:
        return
    low, high = (".".join(map(str, v)) for v in (SUPPORTED[0], SUPPORTED[-1]))
    found = next(filter(None, (find_working("python{}.{}".format(*v)) for v in reversed(SUPPORTED))), None)
    remedy = f"start it with {found} launch.py" if found else f"install Python {high} and start it with that"
    this = ".".join(map(str, version)) + ("" if is_64_bit else " (32-bit)")
    raise LaunchError(f"localmoe needs a 64-bit Python {low} to {high} and this is Python {this}: {remedy}.")


def find_working(name: str) -> str:
    """The path of the program `name` if it starts at all (a version manager's empty shim does not)."""
    path = shutil.which(name)
    return path if path and output_of([path, "--version"]) else ""


def output_of(command: "list[str]") -> str:
    """What the command printed, or nothing when it could not run or failed."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


def wanted_torch(system: str) -> str:
    """'cuda' where an NVIDIA GPU is seen, else 'cpu'; LOCALMOE_TORCH=cpu|cuda overrides."""
    forced = os.environ.get("LOCALMOE_TORCH") or "auto"
    if forced not in ("auto", "cpu", "cuda"):
        raise LaunchError(f"LOCALMOE_TORCH is '{forced}': set it to cpu or cuda, or remove it.")
    if forced != "auto" or system == "Darwin":
        return "cuda" if forced == "cuda" else "cpu"
    library = os.path.join(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "nvcuda.dll")
    driver = os.path.exists(library if system == "Windows" else "/dev/nvidia0")
    return "cuda" if driver or "GPU 0" in output_of(["nvidia-smi", "-L"]) else "cpu"


def home_folder() -> Path:
    """Where chats, models, logs and the address of the running app are kept."""
    return Path(os.path.expanduser(os.environ.get("LOCALMOE_HOME") or "~/.localmoe")).resolve()


def take_lock(path: Path):  # type: ignore[no-untyped-def]
    """An open file that holds the lock until it is closed, also by every process that it was passed to; None
    when another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        if WINDOWS:
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return None
        raise
    return file


def write_atomically(path: Path, value: "dict[str, object]") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(str(part), str(path))


def read_json(path: Path) -> dict:  # type: ignore[type-arg]
    """The object in the file; empty when the file is absent or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# ---- set-up ----


class Progress:
    """One line saying which step runs, what it is at, for how long; without a terminal a line every 20 s."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step, self.title = steps, 0, ""
        self.began, self.printed, self.width = time.monotonic(), 0.0, 0
        self.live = sys.stdout is not None and sys.stdout.isatty()  # None: closed, as by pythonw

    def next(self, title: str) -> None:
        self.step, self.title, self.printed = self.step + 1, title, 0.0
        self.show("")

    def show(self, detail: str) -> None:
        now = time.monotonic()
        if not self.live and self.printed and now - self.printed < 20:
            return
        self.printed = now
        elapsed = "{}:{:02d}".format(*divmod(int(now - self.began), 60))
        text = f"[{self.step}/{self.steps}] {self.title}{': ' + detail if detail else ''} ({elapsed})"
        if not self.live:
            say(text)
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        print("\r" + text.ljust(self.width), end="", flush=True)
        self.width = len(text)

    def end_line(self) -> None:
        if self.width:
            say("")
        self.width = 0


def describe(output: str) -> str:
    """What pip is at, from its last telling line."""
    for line in reversed(output.splitlines()):
        words = re.match(r"\s*Downloading (?:\S*/)?([\w.]+)-\S+ (\([^)]+\))", line)
        if words:
            return f"downloading {words.group(1)} {words.group(2)}"
        words = re.match(r"Collecting ([\w.-]+)", line)
        if words:
            return f"looking up {words.group(1)}"
        if line.startswith("Installing collected packages"):
            return f"unpacking {line.count(',') + 1} packages"
    return ""


def torch_attempts(system: str, kind: str, index: str) -> "list[tuple[list[str], str]]":
    """(pip arguments, notice) to try in turn until one is found.

    Pip's own sources win wherever they hold the right build, so local wheels and mirrors keep working.
    PyTorch's index is asked only where they would give the other build: CUDA (gigabytes) on Linux, CPU on
    Windows.
    """
    plain, cpu = f"torch=={TORCH}", f"torch=={TORCH}+cpu"
    elsewhere = ["--no-deps", "--timeout", "15", "--retries", "2", "--index-url"]
    if system == "Linux" and kind == "cpu":
        notice = "PyTorch's CPU builds cannot be reached: taking the standard one, with gigabytes of CUDA."
        return [([cpu], ""), ([cpu, *elsewhere, f"{index}/cpu"], ""), ([plain], notice)]
    fallback = ([plain], "No CUDA build of PyTorch was found: taking the one that pip has.")
    if system == "Linux":
        return [([f"{plain},!={TORCH}+cpu"], ""), fallback]
    if system == "Windows" and kind == "cuda":
        return [([f"{plain}+{CUDA}", *elsewhere, f"{index}/{CUDA}"], ""), fallback]
    return [([plain], "")]


class Setup:
    """Brings `.venv` to what pyproject.toml asks for; only the stamp, written last, says that it is whole."""

    def __init__(self, root: Path, home: Path, extras: "set[str]", torch: str) -> None:
        self.root, self.venv, self.torch = root, root / ".venv", torch
        self.python = self.venv / ("Scripts/python.exe" if WINDOWS else "bin/python")
        self.stamp, self.log = self.venv / "localmoe-setup.json", home / "logs" / "setup.log"
        self.extras = extras | ({"gpu"} if torch == "cuda" else set())
        self.progress, self.lock = Progress(4), None

    def requirements(self) -> dict:  # type: ignore[type-arg]
        """What of pyproject.toml decides the installed packages; a lint setting does not."""
        import tomllib

        path = self.root / "pyproject.toml"
        try:
            whole = tomllib.loads(path.read_text(encoding="utf-8"))
            project = whole["project"]
        except (FileNotFoundError, ValueError, KeyError) as error:  # as a merge that met conflicts leaves it
            raise LaunchError(
                f"{path} is damaged ({error}): put localmoe's own back and start again."
            ) from None
        names = ("dependencies", "optional-dependencies", "scripts", "requires-python")
        return {"build": whole.get("build-system"), **{name: project.get(name) for name in names}}

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([RECIPE, TORCH, self.requirements()]).encode()).hexdigest()

    def installed(self) -> "set[str]":
        folders = [*self.venv.glob("lib/python*/site-packages"), *self.venv.glob("Lib/site-packages")]
        return {path.name.split("-")[0] for folder in folders[:1] for path in folder.glob("*.dist-info")}

    def venv_version(self) -> str:
        """'3.12' when the Python in .venv runs and has pip, else nothing."""
        code = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
        return output_of([str(self.python), "-I", "-c", code])

    def read_stamp(self) -> dict:  # type: ignore[type-arg]
        """What the last set-up wrote down; empty when there is nothing of that kind."""
        stamp = read_json(self.stamp)
        lists = [stamp.get(name, []) for name in ("extras", "packages")]
        texts = all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in lists)
        return stamp if texts else {}

    def why_not_ready(self) -> str:
        """Why an installation is needed; empty when everything is in place. Asks nothing of the network."""
        stamp = self.read_stamp()
        if not stamp:
            return "the last set-up was not finished" if self.venv.exists() else "first start"
        if self.is_moved(stamp):
            return f"the folder was moved or copied from {stamp['root']}"
        if stamp.get("fingerprint") != self.fingerprint():
            return "the requirements have changed"
        if self.torch == "cuda" and stamp.get("torch") != "cuda":
            return "an NVIDIA GPU is seen now"
        if not self.extras <= set(stamp.get("extras", [])):
            return "more packages are needed"
        if self.venv_version() != stamp.get("python"):
            return "the Python of .venv has changed"
        gone = sorted(set(stamp.get("packages", [])) - self.installed())
        return f"{gone[0]} is missing" if gone else ""

    def is_moved(self, stamp: dict) -> bool:  # type: ignore[type-arg]
        """Whether .venv lies elsewhere than where it was made, as its scripts and its link to this checkout
        say. A stamp of before that was noted counts as not moved: gigabytes are not fetched on a guess."""
        try:
            return "root" in stamp and not os.path.samefile(str(stamp["root"]), str(self.real_root()))
        except OSError:  # nothing is there any more
            return True

    def real_root(self) -> Path:
        """The folder that holds .venv itself, where several checkouts share one through links."""
        return self.venv.resolve().parent

    def ensure(self) -> None:
        """Installs what is missing; one start at a time, the others wait for it."""
        if not self.why_not_ready():
            return
        lock = take_lock(self.root / ".venv.lock")
        if not lock:
            say(f"Another start is setting up {self.root}; waiting until it is done.")
        while not lock:
            time.sleep(0.3)
            lock = take_lock(self.root / ".venv.lock")
        with lock:
            why = self.why_not_ready()
            if not why:
                return
            say(f"Setting up localmoe in {self.venv} ({why}); details: {self.log}")
            self.lock = lock
            try:
                self.install()
            finally:
                self.lock = None
                self.progress.end_line()

    def install(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")
        self.check_space(self.torch)
        stamp = self.read_stamp()
        self.extras |= set(stamp.get("extras", []))
        if self.is_moved(stamp) and self.python.exists():
            self.python.unlink()  # so that .venv is made anew, by a later start too if this one is broken off
        if self.stamp.exists():
            self.stamp.unlink()
        self.progress.next("Making .venv")
        self.make_venv()
        self.progress.next(f"PyTorch {TORCH} for {'CUDA' if self.torch == 'cuda' else 'CPU'}")
        uses_torch = any(re.match(r"torch\b", name) for name in self.requirements()["dependencies"] or [])
        if uses_torch:
            self.install_torch()
        self.progress.next("The other packages")
        self.run("Installing the packages", self.pip(["-e", f".[{','.join(sorted(self.extras))}]"]))
        self.progress.next("Checking")
        self.run("The first use", [str(self.python), "-c", "import torch" if uses_torch else "import sys"])
        stamp = {"fingerprint": self.fingerprint(), "python": self.venv_version(), "torch": self.torch}
        stamp = {**stamp, "root": str(self.real_root()), "extras": sorted(self.extras)}
        write_atomically(self.stamp, {**stamp, "packages": sorted(self.installed())})

    def check_space(self, kind: str) -> None:
        """Refuses to begin what cannot end; what a broken-off set-up has written already counts as done."""
        paths = [os.path.join(at, name) for at, _, names in os.walk(str(self.venv)) for name in names]
        needed = max(SPACE[kind] - sum(os.lstat(path).st_size for path in paths), GB)
        free = shutil.disk_usage(str(self.root)).free
        if free < needed:
            raise LaunchError(
                f"The disk of {self.root} has {free / GB:.1f} GB free and the set-up needs about"
                f" {needed / GB:.1f} GB: free some space and start again."
            )

    def make_venv(self) -> None:
        """Makes .venv anew unless it has a working, supported Python with pip."""
        if self.venv_version() in ("{}.{}".format(*v) for v in SUPPORTED):
            return
        try:
            str(self.venv).encode()
        except UnicodeEncodeError:
            raise LaunchError(
                f"Python makes no .venv in {self.root}, as that path is no valid Unicode: rename or move the"
                " folder and start again."
            ) from None
        if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
            raise LaunchError(
                "This Python has no venv module: install it (Debian, Ubuntu: sudo apt install"
                f" python3.{sys.version_info[1]}-venv) and start again."
            )
        base = getattr(sys, "_base_executable", None) or sys.executable
        self.run("Making .venv", [base, "-m", "venv", "--clear", str(self.venv)])

    def install_torch(self) -> None:
        index = os.environ.get("LOCALMOE_TORCH_INDEX") or TORCH_INDEX
        attempts = torch_attempts(platform.system(), self.torch, index)
        for arguments, notice in attempts:
            if notice:
                self.progress.end_line()
                say(notice)
                self.check_space("cuda")
            code, output = self.log_run(self.pip(arguments))
            if code == 0:
                return
            # Only a build that is not there leads on: not a broken download, nor sources that never answered.
            silent = "--index-url" not in arguments and "from versions: none" in output
            offline = NO_NETWORK.search(output) and (silent or "Downloading" in output)
            if arguments == attempts[-1][0] or offline or not NO_MATCH.search(output):
                raise self.failure(f"Installing PyTorch {TORCH}", code, output)

    def pip(self, arguments: "list[str]") -> "list[str]":
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        return [str(self.python), "-m", "pip", "install", *options, *arguments]

    def run(self, what: str, command: "list[str]") -> None:
        code, output = self.log_run(command)
        if code != 0:
            raise self.failure(what, code, output)

    def log_run(self, command: "list[str]") -> "tuple[int, str]":
        """Runs the command with its output in the log, showing where it is at; (exit code, output)."""
        environment = clean_environment(PYTHONUNBUFFERED="1")
        with self.log.open("ab+") as log:
            log.write(f"$ {' '.join(command)}\n".encode("utf-8", "backslashreplace"))
            log.flush()
            start = log.tell()

            def output() -> str:
                log.seek(start)
                return log.read().decode("utf-8", "replace")

            # A child that outlives a killed launch.py goes on writing, so it holds the lock too. Windows
            # locks for one process alone and has no simple way to this: the next start may come early there.
            held = [self.lock.fileno()] if self.lock and not WINDOWS else []
            child = subprocess.Popen(
                command,
                cwd=str(self.root),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=held,
            )
            try:
                while child.poll() is None:
                    time.sleep(0.1)
                    self.progress.show(describe(output()))
            finally:
                if child.poll() is None:
                    child.terminate()
                    child.wait()
            return child.returncode, output()

    def failure(self, what: str, code: int, output: str) -> LaunchError:
        """The one sentence for a failed step, with what to do about it."""
        end = f"and start again, it goes on from there (log: {self.log})."
        if DISK_FULL.search(output):
            folders = f"{self.root} and {tempfile.gettempdir()}"
            return LaunchError(f"{what} filled the disk: free some space for {folders} {end}")
        if NO_NETWORK.search(output):
            return LaunchError(f"{what} failed as no package index answers: connect to the network {end}")
        if "Permission denied" in output or "Read-only file system" in output:
            return LaunchError(f"{what} failed as it may not write: make {self.root} writable {end}")
        if "PyTorch" in what and NO_MATCH.search(output):
            system = f"{platform.system()} {platform.machine()} with Python {platform.python_version()}"
            return LaunchError(
                f"No package index that answers has PyTorch {TORCH} for {system}:"
                f" check the network or use another Python {end}"
            )
        said = [line.strip() for line in output.splitlines() if line.strip()] or [f"exit code {code}"]
        last = next((line for line in reversed(said) if "error" in line.lower()), said[-1])
        return LaunchError(f"{what} failed ({last.rstrip('.')}): mend that {end}")


def clean_environment(**more: str) -> "dict[str, str]":
    """The user's environment less what would make the Python of .venv look or install elsewhere."""
    drop = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_PREFIX")
    return {**{k: v for k, v in os.environ.items() if k not in drop}, "PIP_USER": "0", **more}


# ---- the running app ----


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Without this a port just left by another server would count as taken; on Windows it would never.
            option = socket.SO_EXCLUSIVEADDRUSE if WINDOWS else socket.SO_REUSEADDR  # type: ignore[attr-defined]
            probe.setsockopt(socket.SOL_SOCKET, option, 1)
            probe.bind(address)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise LaunchError(f"'{host}' is no address of this machine: use {HOST}.") from None
        return False
    return True


def local_host(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def page_url(host: str, port: int) -> str:
    name = local_host(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def is_answering(host: str, port: int) -> bool:
    """Whether a localmoe answers there; asked directly, whatever proxy is set."""
    connection = http.client.HTTPConnection(local_host(host), port, timeout=2)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status == 200 and json.loads(response.read(65536)).get("app") == "localmoe"
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def open_browser(url: str) -> "threading.Thread | None":
    """Opens the page without waiting; not on a Linux without a screen, where a text browser could start."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "WSL_DISTRO_NAME")
    if platform.system() == "Linux" and not any(os.environ.get(name) for name in screens):
        return None
    thread = threading.Thread(target=webbrowser.open, args=(url,), daemon=True)
    thread.start()
    return thread


class Child:
    """A child process that gets each stop signal once; `alone` keeps the terminal's own Ctrl+C from it."""

    def __init__(self, command: "list[str]", root: Path, alone: bool, **env: str) -> None:
        self.alone, self.stop_at, self.pending = alone and not WINDOWS, 0.0, 0
        self.process: subprocess.Popen[bytes] | None = None
        for signum in STOP_SIGNALS:
            signal.signal(signum, self.stop)
        environment = clean_environment(**env)
        self.process = subprocess.Popen(command, cwd=str(root), env=environment, start_new_session=self.alone)
        if self.pending:
            self.process.send_signal(self.pending)

    def stop(self, signum: int, _frame: object) -> None:
        if signum == getattr(signal, "SIGHUP", None):
            signum = signal.SIGTERM  # a closed terminal is a wish for a clean end
        first, self.stop_at = not self.stop_at, self.stop_at or time.monotonic() + GRACE_S
        if self.process is None:
            self.pending = signum
        elif self.alone and not first:
            if (
                time.monotonic() > self.stop_at - GRACE_S + 1
            ):  # a person asks again; a tool may send two at once
                self.process.kill()
        elif self.alone or signum == signal.SIGTERM:
            self.process.send_signal(signum)

    def exit_code(self) -> "int | None":
        assert self.process is not None
        code = self.process.poll()
        if code is None and self.alone and self.stop_at and time.monotonic() > self.stop_at:
            self.process.kill()
        return code if code is None or code >= 0 else 128 - code


class Server:
    """Starts the app on a free port, or finds the one that already runs for this home folder."""

    def __init__(self, setup: Setup, home: Path, options: argparse.Namespace) -> None:
        self.setup, self.home, self.options = setup, home, options
        self.lock = None

    def running(self) -> "tuple[str, int] | None":
        """Where the app says that it listens, if it does answer there."""
        state = read_json(self.home / "run" / "server.json")
        host, port = state.get("host"), state.get("port")
        if isinstance(host, str) and isinstance(port, int) and is_answering(host, port):
            return host, port
        return None

    def open_running(self) -> bool:
        """Opens the page of an app that runs, or is just starting, for this home folder."""
        found = self.running()
        self.lock = None if found else take_lock(self.home / "run" / "server.lock")
        if not found and not self.lock:
            say("Another start is under way; waiting for its page.")
        while not found and not self.lock:
            time.sleep(0.2)
            found, self.lock = self.running(), take_lock(self.home / "run" / "server.lock")
        if not found:
            return False
        url = page_url(*found)
        say(f"localmoe is already running at {url}; stop that one first to start it with other options.")
        thread = None if self.options.no_browser else open_browser(url)
        if thread:
            thread.join(10)
        return True

    def start(self) -> int:
        """Runs the app until it ends and returns its exit code."""
        host, wanted = self.options.host, self.options.port
        for port in range(wanted, min(wanted + PORTS_TRIED, 65536)):
            if not port_is_free(host, port):
                continue
            if port != wanted:
                say(f"Port {wanted} is taken; using {port}.")
            code = self.run_app(port)
            if code != PORT_TAKEN:
                return code
        raise LaunchError(
            f"Port {wanted} and the next ones are taken or not allowed: choose one with --port."
        )

    def run_app(self, port: int) -> int:
        host, model = self.options.host, self.options.model
        command = [str(self.setup.python), "-m", "app", "--host", host, "--port", str(port), "--no-browser"]
        if model:
            command += ["--model", os.path.abspath(model) if os.path.isdir(model) else model]
        if self.options.vram_budget:
            command += ["--vram-budget", self.options.vram_budget]
        say("Starting localmoe ...")
        child = Child(command, self.setup.root, alone=True, LOCALMOE_HOME=str(self.home))
        opened, code = self.options.no_browser, child.exit_code()
        while code is None:
            if not opened and is_answering(host, port):
                opened = True
                open_browser(page_url(host, port))
            time.sleep(0.1)
            code = child.exit_code()
        return code


# ---- command line ----


def version(root: Path) -> str:
    text = (root / "localmoe" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__\s*(?::[^=]*)?=\s*"([^"]+)"', text, re.MULTILINE)
    return found.group(1) if found else "unknown"


def port_number(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port: use 1 to 65535")
    return int(text)


def parse(arguments: "list[str]") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="Sets localmoe up in .venv beside this file, starts it, opens the chat in the browser.",
        epilog="'launch.py test [pytest arguments]' sets up and runs the tests. Environment: LOCALMOE_HOME"
        " (chats, models, logs; default ~/.localmoe), LOCALMOE_TORCH=cpu|cuda (build of PyTorch; default by"
        " what the machine has).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host",
        default=HOST,
        help="address to listen on: 127.0.0.1, localhost or ::1, as only this computer is let in"
        " (default %(default)s)",
    )
    parser.add_argument(
        "--port", type=port_number, default=PORT, help="first port to try (default %(default)s)"
    )
    parser.add_argument("--model", help="a model folder, a Hub repository or 'demo'")
    parser.add_argument("--vram-budget", metavar="SIZE", help="device memory to use, such as 10GiB")
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    parser.add_argument("--version", action="version", version=f"localmoe {version(ROOT)}")
    if arguments[:1] != ["test"]:
        return argparse.Namespace(tests=None, **vars(parser.parse_args(arguments)))
    if {"-h", "--help"} & set(arguments):
        parser.parse_args(["--help"])
    return argparse.Namespace(tests=arguments[1:])


def run(options: argparse.Namespace) -> int:
    check_python(sys.version_info[:3], sys.maxsize > 2**32)
    home, testing = home_folder(), options.tests is not None
    setup = Setup(ROOT, home, {"app", "dev"} if testing else {"app"}, wanted_torch(platform.system()))
    setup.ensure()
    if not testing:
        server = Server(setup, home, options)
        return 0 if server.open_running() else server.start()
    child = Child([str(setup.python), "-m", "pytest", *options.tests], ROOT, alone=False)
    code = child.exit_code()
    while code is None:
        time.sleep(0.05)
        code = child.exit_code()
    return code


def interrupt(signum: int, _frame: object) -> None:
    raise KeyboardInterrupt(signum)


def main(arguments: "list[str]") -> int:
    with contextlib.suppress(AttributeError):  # names that the terminal's encoding lacks must not stop us
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        options = parse(arguments)
        for signum in STOP_SIGNALS:
            signal.signal(signum, interrupt)
        return run(options)
    except LaunchError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        remedy = "make it writable, or move localmoe or LOCALMOE_HOME, and start again"
        if error.errno == errno.ENOSPC:
            remedy = "free some space and start again"
        print(f"{error.filename or ROOT}: {error.strerror or error}; {remedy}.", file=sys.stderr)
    except KeyboardInterrupt as stop:
        print("Stopped; the next start goes on from here.", file=sys.stderr)
        return 128 + int(stop.args[0] if stop.args else signal.SIGINT)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
