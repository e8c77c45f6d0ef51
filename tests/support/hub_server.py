"""A Hub of its own for tests, over real HTTP on this machine: the models API, file links that lead to a
second server for large files, ranges, and faults. Counts what it sends. Checks no client."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_the_tests"
_PIECE_BYTES = 1 << 14


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer that carries a file.

    Attributes:
        status: this status instead of the file.
        cut_after: the connection ends after so many bytes of the body.
        flip_at: this byte of the file arrives changed.
        ignore_range: the whole file is sent, whatever was asked for.
        shift: the range that is sent begins so many bytes later than asked, and says so.
        no_length: the end of the connection is the end of the body.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    flip_at: int | None = None
    ignore_range: bool = False
    shift: int = 0
    no_length: bool = False


@dataclass
class Request:
    """One request; `sent` counts the bytes of the body so far."""

    server: Literal["hub", "cdn"]
    path: str
    start: int | None
    token: str | None
    sent: int = 0


@dataclass
class Repo:
    """Commits in order; the last one is the main branch. revisions: other branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    tags: tuple[str, ...] = ()
    licence: str = ""
    task: str = "text-generation"
    downloads: int = 7
    revisions: dict[str, str] = field(default_factory=dict)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a model folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def is_large(name: str) -> bool:
    """Whether the Hub stores it as a large file, known by its SHA-256 and sent by the other server."""
    return name.endswith((".safetensors", "tokenizer.json", ".bin"))


def digest_of(name: str, data: bytes) -> str:
    """SHA-256 of a large file, git's blob id of another."""
    if is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubServer:
    """The two servers and what they know. `rate`: bytes a second of each answer; `etags`: whether files have
    them; `on_file` is called before a file is answered; `instead`: contents that a file of that name is
    answered with, whatever the listing says of it; `sizes`: bytes that the listing says of a file;
    `api_faults`: statuses, or bodies, of the API's next answers."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, deque[Fault]] = {}
        self.api_faults: deque[int | bytes] = deque()
        self.requests: list[Request] = []
        self.rate: float | None = None
        self.etags = True
        self.on_file: Callable[[str], None] = lambda name: None
        self.instead: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self._servers = [_serve(self, "hub"), _serve(self, "cdn")]
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def commit(self, repo_id: str, files: Mapping[str, bytes]) -> str:
        """A new commit of a repo, which may be new too; returns its hash."""
        repo = self.repos.setdefault(repo_id, Repo())
        listing = "".join(f"{name} {digest_of(name, data)}\n" for name, data in sorted(files.items()))
        commit = hashlib.sha1(f"{len(repo.commits)} {listing}".encode()).hexdigest()
        repo.commits[commit] = dict(files)
        return commit

    def fail(self, name: str, *faults: Fault) -> None:
        """The next answers with this file go wrong so, one after the other."""
        self.faults.setdefault(name, deque()).extend(faults)

    def bodies(self, name: str = "") -> list[Request]:
        """Requests that were answered with (part of) a file, or of this one."""
        return [
            one for one in self.requests if one.sent and one.path.endswith(name) and "/api/" not in one.path
        ]

    def close(self) -> None:
        """Stop both servers; answers under way are cut."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running Hub with no repos."""
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error of the server."""


def _serve(hub: HubServer, kind: Literal["hub", "cdn"]) -> ThreadingHTTPServer:
    class Handler(_Handler):
        pass

    Handler.hub, Handler.kind = hub, kind
    server = _QuietServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    kind: Literal["hub", "cdn"]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for the receipt of its headers

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.asked = Request(self.kind, path, int(asked[1]) if asked else None, token)
        self.hub.requests.append(self.asked)
        if self.kind == "cdn":
            self._from_cdn(path)
        elif path.startswith("/api/") and self.hub.api_faults:
            fault = self.hub.api_faults.popleft()
            self._answer(200, fault, {}) if isinstance(fault, bytes) else self._refuse(fault, "")
        elif path == "/api/models":
            self._search(parse_qs(urlsplit(self.path).query))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path):
            self._refs(match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._about(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self._refuse(404, "RepoNotFound")

    def _about(self, repo_id: str, revision: str | None) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and self.asked.token != TOKEN):
            return self._refuse(401, "RepoNotFound")
        commit = list(repo.commits)[-1] if revision in (None, "main") else revision
        commit = repo.revisions.get(str(commit), commit)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for name, data in repo.commits[commit].items():
            digest = digest_of(name, data)
            size = self.hub.sizes.get(name, len(data))
            entry = {"rfilename": name, "size": size, "blobId": digest[:40]}
            if is_large(name):
                entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append(entry)
        gated = "auto" if repo.gated else False
        info = {
            "id": repo_id, "sha": commit, "private": repo.private, "gated": gated, "siblings": siblings,
            "tags": list(repo.tags), "cardData": {"license": repo.licence} if repo.licence else {},
        }  # fmt: skip
        self._answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _refs(self, repo_id: str) -> None:
        repo = self.hub.repos[repo_id]
        refs: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": []}
        for name, commit in {**repo.revisions, "main": list(repo.commits)[-1]}.items():
            kind = "tags" if name.startswith("v") else "branches"
            refs[kind].append({"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit})
        self._answer(200, json.dumps(refs).encode(), {"Content-Type": "application/json"})

    def _search(self, asked: dict[str, list[str]]) -> None:
        """Public repos whose names hold the words, or that have the tag; as the Hub lists them."""
        words, tag, task = (asked.get(name, [""])[0] for name in ("search", "filter", "pipeline_tag"))
        found = [
            _listed(repo_id, repo)
            for repo_id, repo in self.hub.repos.items()
            if words.lower() in repo_id.lower() and (not tag or tag in repo.tags) and not repo.private
            if not task or task == repo.task
        ]
        found.sort(key=lambda entry: -entry["downloads"])
        limit = int(asked.get("limit", ["1000"])[0])
        self._answer(200, json.dumps(found[:limit]).encode(), {"Content-Type": "application/json"})

    def _file(self, repo_id: str, commit: str, name: str) -> None:
        self.hub.on_file(name)
        repo = self.hub.repos.get(repo_id)
        if repo is None or commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        if repo.gated and self.asked.token != TOKEN:
            return self._refuse(403 if self.asked.token else 401, "GatedRepo")
        data = self.hub.instead.get(name, repo.commits[commit].get(name))
        if data is None:
            return self._refuse(404, "EntryNotFound")
        digest = digest_of(name, data)
        if not is_large(name):
            return self._send(name, data, {"ETag": f'"{digest}"', "X-Repo-Commit": commit})
        link = f"{self.hub.cdn_url}/{repo_id}/{commit}/{name}?signature=valid"
        self._answer(302, b"", {"Location": link, "X-Linked-ETag": f'"{digest}"', "ETag": '"of-the-link"'})

    def _from_cdn(self, path: str) -> None:
        owner, model, commit, name = path.strip("/").split("/", 3)
        listed = self.hub.repos[f"{owner}/{model}"].commits[commit][name]
        self._send(name, self.hub.instead.get(name, listed), {"ETag": '"cdn"'})

    def _send(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        faults = self.hub.faults.get(name)
        fault = faults.popleft() if faults else Fault()
        if fault.status:
            return self._answer(fault.status, b"{}", dict(fault.headers))
        start = self.asked.start
        if start is None or fault.ignore_range:
            start, status = 0, 200
        elif start >= len(data):
            return self._answer(416, b"", {})
        else:
            start, status = start + fault.shift, 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if fault.flip_at is not None:
            data = data[: fault.flip_at] + bytes([data[fault.flip_at] ^ 1]) + data[fault.flip_at + 1 :]
        self._answer(status, data[start:], headers, fault.cut_after, with_length=not fault.no_length)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code} if code else {})

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        cut: int | None = None,
        *,
        with_length: bool = True,
    ) -> None:
        self.send_response(status)
        length = {"Content-Length": str(len(body))} if with_length else {"Connection": "close"}
        for name, value in {**headers, **length}.items():
            if self.hub.etags or "ETag" not in name:
                self.send_header(name, value)
        self.end_headers()
        for i in range(0, len(body), _PIECE_BYTES):
            piece = body[i : i + _PIECE_BYTES]
            if cut is not None and i + len(piece) >= cut:
                self.wfile.write(piece[: cut - i])
                self.asked.sent += cut - i
                self.close_connection = True
                return
            self.wfile.write(piece)
            self.asked.sent += len(piece)
            if self.hub.rate:
                time.sleep(len(piece) / self.hub.rate)


def _listed(repo_id: str, repo: Repo) -> dict[str, Any]:
    """An entry of a search."""
    files = list(repo.commits.values())[-1]
    config = json.loads(files.get("config.json", b"{}"))
    kept = ("model_type", "quantization_config", "auto_map")
    entry: dict[str, Any] = {
        "id": repo_id, "tags": list(repo.tags), "gated": "auto" if repo.gated else False,
        "downloads": repo.downloads, "config": {name: config[name] for name in kept if name in config},
        "cardData": {"license": repo.licence} if repo.licence else {},
    }  # fmt: skip
    weights = [data for name, data in files.items() if name.endswith(".safetensors")]
    if weights:
        entry["safetensors"] = {"parameters": {"BF16": 1}, "total": sum(map(len, weights)) // 2}
    return entry
