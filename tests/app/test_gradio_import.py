"""The first import of gradio, in processes of their own: without stubs, and as it is where that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_STUBS = """
import ast, inspect, sys
from app.gradio_import import import_gradio
looked, kept = [], ast.get_source_segment
ast.get_source_segment = lambda *arguments, **named: looked.append(1) or kept(*arguments, **named)
getfile = inspect.getfile
import_gradio()
assert "gradio" in sys.modules and not looked, "stubs were made"
assert inspect.getfile is getfile
import gradio
assert inspect.getfile(gradio.Blocks).endswith("blocks.py")
with gradio.Blocks() as page:
    box = gradio.Textbox("hello")
    box.change(lambda text: text, box, box)
assert page.get_config_file()["dependencies"]
"""
NEEDS_FILES = """
import inspect
class Component: ...
where = inspect.getfile(Component)
"""


def run(code: str, *path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_gradio_works_without_making_stubs() -> None:
    run(WITHOUT_STUBS)


def test_a_gradio_that_needs_to_know_its_files_is_imported_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "gradio").mkdir()
    (tmp_path / "gradio" / "__init__.py").write_text(NEEDS_FILES)
    run(
        "from app.gradio_import import import_gradio\nimport_gradio()\n"
        "import gradio, inspect\nassert gradio.where.endswith('__init__.py')\n"
        "assert inspect.getfile(gradio.Component) == gradio.where",
        tmp_path,
    )
