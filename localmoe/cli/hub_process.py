"""`python -m localmoe.cli.hub_process`: the Hub's side of the page, a process of its own, so that the page's
stays offline and answers are not slowed by checksums. Speaks JSON lines; decides nothing and keeps nothing.

In: {"id": 1, "do": "search", "with": {"query": "qwen"}}, or {"cancel": 1}. Out: {"id": 1, "progress": {...}}
any number of times, then {"id": 1, "result": ...} or {"id": 1, "error": {"kind": class, "text": sentence}}.
The end of its input ends it, so it never outlives the page.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

from localmoe.core.errors import LocalMoeError
from localmoe.core.hub_address import check_hub_address
from localmoe.core.types import Progress
from localmoe.engine import import_all

INTERNAL = "InternalError"
Report = Callable[[Progress], None]
Action = Callable[[Mapping[str, Any], Report, threading.Event], Any]


def _prepare(given: Mapping[str, Any], report: Report, cancel: threading.Event) -> Any:
    import_all()


def _search(given: Mapping[str, Any], report: Report, cancel: threading.Event) -> Any:
    import_all()
    from localmoe.engine.searching import search_runnable

    return [asdict(hit) for hit in search_runnable(str(given["query"]))]


def _repo_facts(given: Mapping[str, Any], report: Report, cancel: threading.Event) -> Any:
    import_all()
    from localmoe.engine.facts import repo_facts

    return repo_facts(str(given["repo_id"]), given.get("revision")).as_dict()


def _local_facts(given: Mapping[str, Any], report: Report, cancel: threading.Event) -> Any:
    import_all()
    from localmoe.engine.facts import local_facts

    return local_facts(str(given["model"])).as_dict()


def _pull(given: Mapping[str, Any], report: Report, cancel: threading.Event) -> Any:
    import_all()
    from localmoe.engine.pulling import pull_draft, pull_model

    pull = pull_draft if given.get("draft") else pull_model
    return str(pull(str(given["repo_id"]), given.get("revision"), progress=report, cancel=cancel))


ACTIONS: Mapping[str, Action] = {
    "prepare": _prepare, "search": _search, "repo_facts": _repo_facts, "local_facts": _local_facts,
    "pull": _pull,
}  # fmt: skip


class HubProcess:
    """Runs every request in a thread of its own and writes its answers, a line each."""

    def __init__(self, output: TextIO, actions: Mapping[str, Action] = ACTIONS) -> None:
        self._output, self._actions = output, actions
        self._writing = threading.Lock()
        self._cancels: dict[int, threading.Event] = {}

    def serve(self, lines: TextIO) -> None:
        """Until the input ends; then what runs is cancelled."""
        for line in lines:
            message = json.loads(line)
            if "cancel" in message:
                self._cancels.get(int(message["cancel"]), threading.Event()).set()
                continue
            cancel = self._cancels[int(message["id"])] = threading.Event()
            threading.Thread(target=self._run, args=(message, cancel), daemon=True).start()
        for cancel in self._cancels.values():
            cancel.set()

    def _run(self, message: Mapping[str, Any], cancel: threading.Event) -> None:
        number = int(message["id"])

        def report(progress: Progress) -> None:
            self._write({"id": number, "progress": asdict(progress)})

        answer: dict[str, Any]
        try:
            check_hub_address()
            answer = {"result": self._actions[str(message["do"])](message["with"], report, cancel)}
        except LocalMoeError as error:
            answer = {"error": {"kind": type(error).__name__, "text": str(error)}}
        except Exception:  # a fault of localmoe: the page says so in a sentence, the terminal has the rest
            traceback.print_exc()
            answer = {"error": {"kind": INTERNAL, "text": ""}}
        self._cancels.pop(number, None)
        self._write({"id": number, **answer})

    def _write(self, message: Mapping[str, Any]) -> None:
        # an error: the page went away, and the input ends too
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()


def main() -> int:
    """Serve stdin; what libraries print goes to stderr."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(KeyboardInterrupt):
        HubProcess(output).serve(sys.stdin)
    sys.stderr.flush()
    os._exit(0)  # threads in the middle of a request are not waited for; what has arrived is on the disk


if __name__ == "__main__":
    main()
