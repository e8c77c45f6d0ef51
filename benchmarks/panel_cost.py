"""What does an open page cost the answer that it shows? Answers of a model under the real page's server,
alone and watched by a client that asks as the page's scripts do.

Kinds of watching: live: /live once a second (map, link); steps: the same with the step's timeline recorded
and drawn; page: also the page's own timer, which fetches the text and the panel. The client is a process of
its own on the same cores, as a browser is. Rounds go through all kinds in turn, so that a busy machine
disturbs them alike; the cost is the median over rounds of 1 - watched / alone speed. What one request takes
of the server's CPU is measured apart, when nothing else runs.

    python benchmarks/panel_cost.py [--model demo] [--rounds 8] [--tokens 96] [--json]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

KINDS = ("alone", "live", "steps", "page")
LIVE_S, TICK_S = 1.0, 0.12  # as static/live.js and screen.BUSY_S ask
QUESTION = "Tell me a long story about a fox and a bear."


class Client:
    """Asks as a page does."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._seen = ""
        self._tick: dict[str, Any] = {}

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        text = None if body is None else json.dumps(body)
        self._http.request(method, path, text, {"Content-Type": "application/json"} if text else {})
        answer = self._http.getresponse()
        content = answer.read()
        assert answer.status == 200, (path, answer.status, content[:300])
        return json.loads(content)

    def live(self, *, timeline: bool) -> None:
        """The map, the link and, if wanted, the step."""
        told = self._ask("GET", f"/live?language=en{'&timeline=true' if timeline else ''}")
        assert told["cells"]

    def tick(self) -> None:
        """The page's timer."""
        if not self._tick:
            self._tick = self._find_tick()
        body = {**self._tick, "data": [None, self._seen], "event_data": None}
        self._seen = self._ask("POST", "/gradio_api/run/predict", body)["data"][self._seen_at]

    def _find_tick(self) -> dict[str, Any]:
        config = self._ask("GET", "/config")
        hidden = {part["id"] for part in config["components"] if part["props"].get("label") == "Shown"}
        for listener in config["dependencies"]:
            ticks = any(event == "tick" for _, event in listener["targets"])
            if ticks and hidden & set(listener["inputs"]):
                self._seen_at = next(i for i, out in enumerate(listener["outputs"]) if out in hidden)
                trigger = listener["targets"][0][0]
                return {"fn_index": listener["id"], "trigger_id": trigger, "session_hash": "panelcost"}
        raise AssertionError("the page has no timer")


def watch(port: int, kind: str) -> None:
    """The client process: ask at the page's rate until stdin ends."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    client = Client(port)
    next_live = next_tick = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_live:
            client.live(timeline=kind != "live")
            next_live = now + LIVE_S
        if kind == "page" and now >= next_tick:
            client.tick()
            next_tick = now + TICK_S
        wake = min(next_live, next_tick) if kind == "page" else next_live
        time.sleep(max(0.0, wake - time.monotonic()))


class App:
    """The page's server in this process, with a loaded model."""

    def __init__(self, model: str, home: Path) -> None:
        from app.__main__ import load_engine
        from app.address import bind
        from app.models.service import ModelsService
        from app.server import PageServer, make_app
        from app.service import ChatService

        self.service = ChatService(home, load_engine, lambda: [])
        self.sock = bind("127.0.0.1", 0)
        self.port = int(self.sock.getsockname()[1])
        self._server = PageServer(make_app(self.service, ModelsService(home, self.service, {}), self.port))
        self._serving = threading.Thread(target=self._server.run, args=([self.sock],), daemon=True)
        self._serving.start()
        self.service.holder.load(model, self.service.load_settings.engine_config(self.service.answers))
        while self.service.holder.status().phase == "loading" or not self._server.started:
            time.sleep(0.05)
        assert self.service.holder.status().phase == "ready", self.service.holder.status().error

    def answer(self, tokens: int) -> float:
        """Tokens a second of one greedy answer to the same question, with drafts of one length."""
        chosen = {"max_new_tokens": tokens, "temperature": 0.0, "draft_length": 4}
        self.service.set_answers({**vars_of(self.service.answers), **chosen})
        self.service.send(None, QUESTION)
        while self.service.runner.running():
            time.sleep(0.01)
        view = self.service.runner.view()
        assert view is not None and view.stats is not None and view.stats.tokens_per_s, view
        return view.stats.tokens_per_s

    def request_ms(self) -> dict[str, float]:
        """CPU time of this process that one request takes, by kind, after an answer and with none running."""
        client, found = Client(self.port), {}
        asks = {
            "live": lambda: client.live(timeline=False), "steps": lambda: client.live(timeline=True),
            "tick": client.tick,
        }  # fmt: skip
        for name, ask in asks.items():
            ask()
            before = time.process_time()
            for _ in range(50):
                ask()
            found[name] = 1e3 * (time.process_time() - before) / 50
        return found

    def close(self) -> None:
        """End server and engine."""
        self._server.should_exit = True
        self._serving.join()
        self.service.close()
        self.sock.close()


def vars_of(settings: Any) -> dict[str, object]:
    """A frozen dataclass as plain values."""
    from dataclasses import asdict

    return asdict(settings)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    with tempfile.TemporaryDirectory() as home:
        app = App(args.model, Path(home))
        try:
            app.answer(args.tokens)
            rounds = [_round(app, args.tokens, number) for number in range(args.rounds)]
            request_ms = app.request_ms()
        finally:
            app.close()
    costs = {
        kind: [100 * (1 - found[kind] / found["alone"]) for found in rounds]
        for kind in KINDS
        if kind != "alone"
    }
    return {
        "model": args.model,
        "tokens_per_s": {kind: statistics.median(found[kind] for found in rounds) for kind in KINDS},
        "cost_percent": {kind: statistics.median(values) for kind, values in costs.items()},
        "cost_quartiles": {kind: statistics.quantiles(values, n=4)[::2] for kind, values in costs.items()},
        "request_cpu_ms": request_ms,
        "cpu_percent_of_a_core": {
            "live": request_ms["live"] / LIVE_S / 10,
            "steps": request_ms["steps"] / LIVE_S / 10,
            "page": (request_ms["steps"] / LIVE_S + request_ms["tick"] / TICK_S) / 10,
        },
    }


def _round(app: App, tokens: int, number: int) -> dict[str, float]:
    found = {}
    order = KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]
    for kind in order:
        command = [sys.executable, __file__, "--watch", kind, "--port", str(app.port)]
        client = None if kind == "alone" else subprocess.Popen(command, stdin=subprocess.PIPE)
        time.sleep(1.0)  # the client's start is no part of it
        try:
            found[kind] = app.answer(tokens)
        finally:
            if client is not None:
                assert client.poll() is None, "the client failed"
                client.communicate()
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--watch", choices=KINDS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.watch:
        return watch(args.port, args.watch)
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    speeds, costs = result["tokens_per_s"], result["cost_percent"]
    print(f"{args.model}: alone {speeds['alone']:.1f} tok/s, median of {args.rounds} rounds")
    for kind, cost in costs.items():
        low, high = result["cost_quartiles"][kind]
        cpu = result["cpu_percent_of_a_core"][kind]
        print(
            f"  {kind:5s} {speeds[kind]:6.1f} tok/s, cost {cost:5.1f} % (quartiles {low:.1f} to {high:.1f}), "
            f"its requests take {cpu:.2f} % of a core"
        )
    print("  a request: " + ", ".join(f"{n} {ms:.2f} ms" for n, ms in result["request_cpu_ms"].items()))


if __name__ == "__main__":
    main()
