"""What does an open page cost the answer that it shows? Answers of a model under the real page's server,
alone and watched, with all panels open.

Kinds of watching: script: a client that asks /now and /live as the page's scripts do, with the step's
timeline recorded and drawn; browser: the page itself in Chromium (where playwright and a browser are
installed); panel, of pairs alone: the page, with its live panel shown and put away in turn. The server has
one core and its watcher another one, so that only the server's share is counted. Rounds go through all kinds
in turn, so that a busy machine disturbs them alike.

Two figures, of each kind minus alone: CPU seconds of the server's own threads (event loop, its workers) for a
second of answering, by the threads' clocks, which other programs do not disturb; and tokens a second, which
they do. With --pairs the speed alone is compared, within answers: the watcher is halted every other
stretch of time, so that what disturbs the machine for longer disturbs both alike.

    python benchmarks/panel_cost.py [--model demo] [--rounds 8] [--tokens 700] [--no-browser] [--json]
    python benchmarks/panel_cost.py --pairs 100 [--model demo] [--no-browser] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from panel_watchers import ALONE, BROWSER, PANEL, SCRIPT, Client, Watcher

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

STRETCH_S = 1.5
QUESTION = "Count from 1 to 500."  # the embedded model does it without an end
IDLE_S = 10.0  # of watching an engine that does nothing


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its speed, and CPU seconds a second of it, by threads."""

    tokens_per_s: float
    server_share: float  # event loop and its workers
    process_share: float


class App:
    """The page's server in this process, with a loaded model."""

    def __init__(self, model: str, home: Path) -> None:
        from app.address import bind
        from app.main import load_engine
        from app.models.service import ModelsService
        from app.server import PageServer, make_app
        from app.service import ChatService

        self.service = ChatService(home, load_engine, lambda: [])
        self.sock = bind("127.0.0.1", 0)
        self.port = int(self.sock.getsockname()[1])
        self._models = ModelsService(home, self.service, {})
        self._server = PageServer(make_app(self.service, self._models, self.port))
        self._serving = threading.Thread(target=self._server.run, args=([self.sock],), daemon=True)
        self._serving.start()
        self.service.holder.load(model, self.service.load_settings.engine_config(self.service.answers))
        while self.service.holder.status().phase == "loading" or not self._server.started:
            time.sleep(0.05)
        assert self.service.holder.status().phase == "ready", self.service.holder.status().error
        self._models.start()
        while self._models.fits.hardware() is None:  # measured once, when first asked for
            time.sleep(0.1)
        self.chat_id = ""

    def answer(self, tokens: int) -> Answer:
        """A greedy answer to the same question in the same chat, with drafts of one length."""
        chosen = {"max_new_tokens": tokens, "temperature": 0.0, "own_sampling": False, "draft_length": 4}
        self.service.set_answers({**asdict(self.service.answers), **chosen})
        began, server, process = time.monotonic(), self._server_s(), time.process_time()
        if self.chat_id:
            self.service.retry(self.chat_id)
        else:
            self.chat_id = self.service.send(None, QUESTION)
        self.service.runner.settle()
        seconds = time.monotonic() - began
        shares = (self._since(server) / seconds, (time.process_time() - process) / seconds)
        view = self.service.runner.view()
        assert view is not None and view.stats is not None and view.stats.tokens_per_s, view
        return Answer(view.stats.tokens_per_s, *shares)

    def stretches(self, watcher: Watcher, pairs: int) -> list[tuple[float, float]]:
        """Tokens a second of neighbouring stretches of answers: watched, and with the watcher halted."""
        found: list[tuple[float, float]] = []
        while len(found) < pairs:
            self.service.retry(self.chat_id)
            while self._decoded() == (0, 0.0):
                time.sleep(0.01)
            rates: list[float] = []
            watched_first = len(found) % 2 == 0
            while (before := self._decoded()) is not None:
                watcher.halt((len(rates) % 2 == 0) != watched_first)
                time.sleep(STRETCH_S)
                after = self._decoded()
                if after is not None:
                    rates.append((after[0] - before[0]) / (after[1] - before[1]))
            watcher.halt(False)
            self.service.runner.settle()
            pairs_here = zip(rates[0::2], rates[1::2], strict=False)
            found += [pair if watched_first else pair[::-1] for pair in pairs_here]
        return found[:pairs]

    def _decoded(self) -> tuple[int, float] | None:
        """Tokens after the first one and the seconds that they took; None once the answer has ended."""
        view = self.service.runner.view()
        assert view is not None
        if view.finish is not None:
            return None
        stats = view.stats
        if stats is None or stats.tpot_s is None:
            return 0, 0.0
        return stats.new_tokens - 1, stats.tpot_s * (stats.new_tokens - 1)

    def idle_share(self) -> float:
        """CPU seconds of the server's threads a second, with no answer."""
        before = self._server_s()
        time.sleep(IDLE_S)
        return self._since(before) / IDLE_S

    def _server_s(self) -> dict[int, float]:
        """CPU seconds of each of the server's threads so far."""
        threads = [one for one in threading.enumerate() if one.name.startswith("AnyIO")] + [self._serving]
        idents = [one.ident for one in threads if one.ident is not None]
        return {ident: time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents}

    def _since(self, before: dict[int, float]) -> float:
        """CPU seconds since then. A worker that has ended had been idle for ten seconds."""
        return sum(seconds - before.get(ident, 0.0) for ident, seconds in self._server_s().items())

    def request_ms(self) -> dict[str, float]:
        """CPU time of this process that one request takes, with nothing else to do."""
        client, found = Client(self.port), {}
        asks = {"/now": lambda: client.now(self.chat_id), "/live with a step": client.live}
        for name, ask in asks.items():
            ask()
            before = self._server_s()
            for _ in range(50):
                ask()
            found[name] = 1e3 * self._since(before) / 50
        return found

    def close(self) -> None:
        """End server and engine."""
        self._server.should_exit = True
        self._serving.join()
        self._models.close()
        self.service.close()
        self.sock.close()


def part_cores() -> set[int]:
    """Keep this process on one core, before any thread is started; the others are the watcher's."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    os.environ["OMP_NUM_THREADS"] = "1"
    return set(cores[1:]) or set(cores)


def measure_pairs(args: argparse.Namespace) -> dict[str, Any]:
    """By how much an answer is slower while it is watched."""
    theirs, kinds = part_cores(), {}
    with tempfile.TemporaryDirectory() as home:
        app = App(args.model, Path(home))
        try:
            app.answer(args.tokens)
            for kind in [SCRIPT] if args.no_browser else args.kinds:
                watcher = Watcher(kind, app.port, app.chat_id, theirs)
                slower = [100 * (1 - one / other) for one, other in app.stretches(watcher, args.pairs)]
                watcher.close()
                kinds[kind] = {
                    "slower_percent": statistics.median(slower), "slower_quartiles": _quartiles(slower),
                    "mean": statistics.fmean(slower),
                    "standard_error": statistics.stdev(slower) / len(slower) ** 0.5,
                }  # fmt: skip
        finally:
            app.close()
    return {"model": args.model, "pairs": args.pairs, "stretch_s": STRETCH_S, "kinds": kinds}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    kinds = [ALONE, SCRIPT] if args.no_browser else [ALONE, SCRIPT, BROWSER]
    theirs = part_cores()
    rounds: list[dict[str, Answer]] = []
    idle: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        app = App(args.model, Path(home))
        try:
            app.answer(args.tokens)
            for number in range(args.rounds):
                found = {}
                place = number % len(kinds)
                for kind in kinds[place:] + kinds[:place]:
                    watcher = Watcher(kind, app.port, app.chat_id, theirs)
                    found[kind] = app.answer(args.tokens)
                    if number == 0:
                        idle[kind] = app.idle_share()
                    watcher.close()
                rounds.append(found)
            request_ms = app.request_ms()
        finally:
            app.close()
    return {
        "model": args.model, "rounds": args.rounds, "tokens": args.tokens, "request_cpu_ms": request_ms,
        "kinds": {kind: _summary(kind, rounds, idle[kind]) for kind in kinds},
    }  # fmt: skip


def _summary(kind: str, rounds: list[dict[str, Answer]], idle: float) -> dict[str, Any]:
    """Medians and quartiles; costs are those of each round against the same round's answer alone."""
    slower = [100 * (1 - found[kind].tokens_per_s / found[ALONE].tokens_per_s) for found in rounds]
    added = [100 * (found[kind].server_share - found[ALONE].server_share) for found in rounds]
    return {
        "tokens_per_s": statistics.median(found[kind].tokens_per_s for found in rounds),
        "slower_percent": statistics.median(slower), "slower_quartiles": _quartiles(slower),
        "server_percent_of_a_core": 100 * statistics.median(found[kind].server_share for found in rounds),
        "process_percent_of_a_core": 100 * statistics.median(found[kind].process_share for found in rounds),
        "added_percent_of_a_core": statistics.median(added), "added_quartiles": _quartiles(added),
        "idle_percent_of_a_core": 100 * idle,
    }  # fmt: skip


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4)[::2] if len(values) > 1 else values * 2


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--pairs", type=int, help="compare stretches of answers instead, so many pairs")
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=[SCRIPT, BROWSER, PANEL], help="of watching, for pairs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args) if args.pairs is None else measure_pairs(args)
    if args.json:
        print(json.dumps(result))
    elif args.pairs is not None:
        print(f"{args.model}: {args.pairs} pairs of stretches of {STRETCH_S} s, watched and not")
        for kind, found in result["kinds"].items():
            low, high = found["slower_quartiles"]
            print(
                f"  {kind:8s} slower by {found['slower_percent']:.1f} % in the median ({low:.1f} to "
                f"{high:.1f}), {found['mean']:.1f} +- {found['standard_error']:.1f} % in the mean"
            )
    else:
        report(result)


def report(result: dict[str, Any]) -> None:
    """Print what `measure` found."""
    what = f"{result['rounds']} answers of {result['tokens']} tokens"
    print(f"{result['model']}: medians of {what} (quartiles)")
    for kind, found in result["kinds"].items():
        print(
            f"  {kind:8s} {found['tokens_per_s']:6.1f} tok/s; the server's threads take "
            f"{found['server_percent_of_a_core']:.2f} % of a core, "
            f"{found['idle_percent_of_a_core']:.2f} % while nothing is written"
        )
        if kind != ALONE:
            (low, high), (less, more) = found["slower_quartiles"], found["added_quartiles"]
            print(
                f"           slower by {found['slower_percent']:.1f} % ({low:.1f} to {high:.1f}), its "
                f"requests add {found['added_percent_of_a_core']:.2f} % of a core ({less:.2f} to {more:.2f})"
            )
    print("  a request: " + ", ".join(f"{n} {ms:.2f} ms" for n, ms in result["request_cpu_ms"].items()))


if __name__ == "__main__":
    main()
