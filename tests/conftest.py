"""What all tests run under: a home of their own, no network, one thread, quiet libraries; and tiny models."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

# some eighty processes are started, which would compile all of the source each
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# before any library starts threads: those of several processes would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
# and where a test has two, one that waits sleeps: beside another worker it would use up what the other needs
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# of a folder that is named to pytest the conftest comes before pytest_configure, and may import triton
if sys.platform == "linux" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
import support.without_collector  # noqa: F401 (until all is collected)
from support.fewer_examples import try_half
from support.file_order import order_files
from support.slow_tests import is_plain, leave_out_slow

if TYPE_CHECKING:  # the process that starts the workers needs no engine: they begin seconds sooner
    from localmoe.engine import Engine

# these are tests of kernels, and of what imports them
collect_ignore_glob = (
    [] if importlib.util.find_spec("triton") else ["kernels/gpu/test_*.py", "model/test_device_*.py"]
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_MAC_BROWSER = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
_WITHOUT_GPU = ("app", "chat", "cli", "engine", "launch", "server", "tables")  # folders, see below
TinyModel = tuple[Path, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_report_header(config: pytest.Config) -> str:
    return f"slow tests: {'run too' if config.option.all else 'left out (--all runs them)'}"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.option.all = config.workerinput["all"]
    elif not is_plain(config):
        config.option.all = True
    sys.dont_write_bytecode = False
    home = tempfile.mkdtemp(prefix="localmoe-tests-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ["LOCALMOE_HOME"] = home
    # the first home of a run is that of the process that starts the workers, and outlives them
    os.environ.setdefault("LOCALMOE_TESTS_FIRST_HOME", home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        _prepare_libraries()
        hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is no fault
        hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker reads the command line itself, and finds other sources of its arguments in it."""
    node.workerinput["all"] = node.config.option.all


def _prepare_libraries() -> None:
    """In a process that runs tests."""
    import torch

    # Triton's interpreter where there is no CUDA device; transformers imports triton, which reads this then
    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
    import transformers
    from support.row_paddings import remember_row_paddings

    remember_row_paddings(Path(os.environ["LOCALMOE_TESTS_FIRST_HOME"]))
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.init()  # now: where the first test to ask hides the GPU, it would stay hidden
    with torch.device("cpu"):  # torch remembers its constructors now, before a test replaces one
        torch.empty(0)
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        from support.quick_interpreter import quicken_interpreter

        quicken_interpreter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not config.option.all:
        leave_out_slow(config, items)
        try_half(items)
    order_files(items)
    skips = {}
    if torch.cuda.is_available():
        skips["interpreted"] = pytest.mark.skip(reason="kernels are not interpreted where there is a GPU")
    else:
        skips["gpu"] = pytest.mark.skip(reason="no CUDA device was found")
    if not _has_browser():
        skips["browser"] = pytest.mark.skip(reason="no Chromium or Chrome is installed")
    for item in items:
        for name, mark in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What loads engines by their defaults finds no GPU, here and in processes that it starts, unless it is
    marked for one."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in _WITHOUT_GPU and not item.get_closest_marker("gpu") and torch.cuda.is_available():
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays: else each full collection looks at all of it, 5 % of the time


def _has_browser() -> bool:
    named = os.environ.get("CHROMIUM")
    return bool(named) or any(shutil.which(name) for name in _BROWSERS) or os.path.exists(_MAC_BROWSER)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """architecture -> (folder, transformers' own model) of a tiny random float32 model."""
    from support.tiny_models import tiny_model, write_model

    @cache
    def make(architecture: str) -> TinyModel:
        model = tiny_model(architecture)
        return write_model(tmp_path_factory.mktemp("tiny") / architecture, model), model

    return make


@pytest.fixture(scope="session")
def tiny16(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """architecture -> folder of the same in bfloat16."""
    import torch
    from support.tiny_models import tiny_model, write_model

    @cache
    def make(architecture: str) -> Path:
        model = tiny_model(architecture, dtype=torch.bfloat16)
        return write_model(tmp_path_factory.mktemp("tiny16") / architecture, model)

    return make


@pytest.fixture(scope="session")
def tiny_engine(tiny: Callable[[str], TinyModel]) -> Iterator[Callable[[str], Engine]]:
    """architecture -> a shared engine on the tiny model, with room for a third of its experts."""
    from support.engines import load_with_slots

    engines: list[Engine] = []

    @cache
    def load(architecture: str) -> Engine:
        slots = 5 if architecture == "deepseek_v2" else 8  # of 16, as its first layer is dense, or of 24
        engines.append(load_with_slots(tiny(architecture)[0], slots))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()
