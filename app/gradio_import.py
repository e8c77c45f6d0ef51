"""The first import of gradio, without the type stubs of its components: it makes them anew whenever it is
imported, a third of the import's time, and writes them beside its own files."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def import_gradio() -> None:
    """Import gradio; from then on `import gradio` is at hand. Where a version does not bear to be without its
    stubs, as it is."""
    kept = inspect.getfile

    def getfile(thing: Any) -> str:
        """Gradio makes no stub of a class that is in no file."""
        if isinstance(thing, type) and _is_gradios(thing.__module__):
            raise OSError("no stubs are wanted")
        return kept(thing)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        import gradio
    except OSError:
        for name in [name for name in sys.modules if _is_gradios(name)]:
            del sys.modules[name]
    finally:
        inspect.getfile = kept
    import gradio  # noqa: F401


def _is_gradios(module: str) -> bool:
    return module.partition(".")[0] == "gradio"
