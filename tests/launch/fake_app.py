"""Stands in for the app in the launch tests: answers /health, notes its arguments and the signals it gets.

As the real one it says where it is, in a line and in run/server.json, and exits with 98 when its port is
taken; decides nothing about set-up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import FrameType

import torch  # noqa: F401  (the app needs what the set-up installed)

HOME = Path(os.environ["LOCALMOE_HOME"])


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"app": "localmoe", "version": "9.8.7", "status": "ready"}).encode()
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def note_signal(signum: int, _frame: FrameType | None) -> None:
    with (HOME / "signals.txt").open("a") as file:
        file.write(f"{signal.Signals(signum).name}\n")
    if "FAKE_APP_STUBBORN" not in os.environ:
        sys.exit(int(os.environ.get("FAKE_APP_EXIT", "0")))


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--host", "--port", "--model", "--vram-budget"):
        parser.add_argument(option)
    parser.add_argument("--no-browser", action="store_true")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "options.json").write_text(json.dumps(vars(options)))
    if os.environ.get("FAKE_APP_CRASH"):
        sys.exit(int(os.environ["FAKE_APP_CRASH"]))
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, note_signal)
    if options.port == os.environ.get("FAKE_APP_LOSES_PORT"):
        sys.exit(98)
    try:
        server = HTTPServer((options.host, int(options.port)), Health)
    except OSError:
        sys.exit(98)
    state = HOME / "run" / "server.json"
    state.parent.mkdir(exist_ok=True)
    state.write_text(json.dumps({"pid": os.getpid(), "host": options.host, "port": int(options.port)}))
    print(f"localmoe is ready at http://{options.host}:{options.port}", flush=True)
    with server:
        try:
            server.serve_forever(poll_interval=0.05)
        finally:
            time.sleep(0.2)  # a second signal would still be noted
            state.unlink()


if __name__ == "__main__":
    main()
