"""Asks the Hub, through huggingface_hub, what a repo holds, and reads its small JSON files. Writes nothing to
disk and decides nothing about the model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from localmoe import __version__
from localmoe.core.errors import DownloadError
from localmoe.hub.http_errors import (
    NETWORK_ERRORS,
    RemoteChangedError,
    TransientError,
    check_link,
    check_status,
    sorted_error,
)
from localmoe.hub.http_sessions import hub_endpoint, hub_session
from localmoe.hub.modelopt_config import FILE_NAME, in_brief, wants_file, with_quantisation
from localmoe.hub.remote_files import RemoteFile, RemoteSnapshot
from localmoe.hub.safetensors_header import shown
from localmoe.hub.token import hub_token
from localmoe.hub.weight_files import CONFIG_NAME, MAX_JSON_BYTES

METADATA_TIMEOUT_S = 10.0  # of silence
_NAMED = 10  # revisions in a sentence
_GIT_ID = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# of huggingface_hub, on reading an answer
NO_SENSE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class RemoteAbout:
    """What the Hub tells everybody of a repo. licence: its short name, "" if none is given."""

    snapshot: RemoteSnapshot
    licence: str
    gated: bool


class RemoteRepo:
    """A model repo on the Hub that HF_ENDPOINT names, seen with the user's token if there is one.

    Raises:
        DownloadError: HF_ENDPOINT is no address.
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self.endpoint = hub_endpoint()
        self._token = hub_token()

    def headers(self) -> dict[str, str]:
        """For requests to the Hub itself; the token in them is not for other hosts."""
        headers = {"User-Agent": f"localmoe/{__version__}", "Accept-Encoding": "identity"}
        return headers if self._token is None else {**headers, "Authorization": f"Bearer {self._token}"}

    def url(self, file: RemoteFile, commit: str) -> str:
        """Where the Hub serves a file, or redirects to who does."""
        return hf_hub_url(self.repo_id, file.name, revision=commit, endpoint=self.endpoint)

    def snapshot(self, revision: str | None) -> RemoteSnapshot:
        """The files of a branch, tag or commit; None is the main branch.

        Raises:
            DownloadError, TransientError: as `about`.
        """
        return self.about(revision).snapshot

    def about(self, revision: str | None) -> RemoteAbout:
        """The files of a branch, tag or commit, and what the repo's card says.

        Raises:
            DownloadError: no such repo or revision, no access, an answer that makes no sense, or network
                settings that cannot be used.
            TransientError: the network failed.
        """
        api = HfApi(endpoint=self.endpoint, token=self._token if self._token is not None else False)
        hub_session()  # which the question goes through: settings that cannot be used are said here
        try:
            info = api.model_info(
                self.repo_id, revision=revision, files_metadata=True, timeout=METADATA_TIMEOUT_S
            )
        except NETWORK_ERRORS as error:
            found = sorted_error(self.repo_id, error)
            if isinstance(found, RemoteChangedError):
                found = self._no_revision(revision or "main")
            raise found from error
        except NO_SENSE as error:  # cut short, or of a network's own login page
            raise TransientError("the answer makes no sense") from error
        files = tuple(map(self._file, info.siblings or ()))
        snapshot = RemoteSnapshot(self.repo_id, self._commit(info), files)
        return RemoteAbout(snapshot, licence_of(info), bool(info.gated))

    def read_config(self, snapshot: RemoteSnapshot) -> dict[str, Any]:
        """The model's config, with what a file of ModelOpt's says beside it.

        Raises:
            DownloadError: as read_json, or there is none. TransientError: the network failed.
        """
        file, more = snapshot.find(CONFIG_NAME), snapshot.find(FILE_NAME)
        if file is None:
            raise DownloadError(
                f"{self.repo_id} has no {CONFIG_NAME}, so it is no model that localmoe can run."
            )
        config = self.read_json(file, snapshot.commit)
        if more is not None and wants_file(config):
            config = with_quantisation(config, self.read_json(more, snapshot.commit))
        return in_brief(config)

    def read_json(self, file: RemoteFile, commit: str) -> dict[str, Any]:
        """A JSON object, its checksum compared.

        Raises:
            DownloadError: no access, too long, no JSON object, or network settings that cannot be used.
            TransientError: the network failed.
        """
        if file.num_bytes > MAX_JSON_BYTES:
            raise DownloadError(
                f"{file.name} of {self.repo_id} has {file.num_bytes} bytes, more than {MAX_JSON_BYTES}: "
                "choose another repo."
            )
        session = hub_session()
        try:
            url, headers = self.url(file, commit), self.headers()
            response = session.get(url, headers=headers, timeout=METADATA_TIMEOUT_S, follow_redirects=True)
            check_link(response)
            check_status(response)
        except NETWORK_ERRORS as error:
            found = sorted_error(self.repo_id, error)
            if isinstance(found, RemoteChangedError):
                what = f"{self.repo_id} has no file {shown(file.name)} on the Hub"
                found = DownloadError(f"{what}: check what its page lists.")
            raise found from error
        raw = bytes(response.content)
        hasher = file.hasher()
        hasher.update(raw)
        if hasher.hexdigest() != file.digest:
            raise TransientError(f"{file.name} arrived with a wrong checksum")
        try:
            value = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise DownloadError(f"{file.name} of {self.repo_id} is no JSON object: choose another revision.")
        return value

    def _no_revision(self, wanted: str) -> DownloadError:
        """The sentence for a branch, tag or commit that is not there, with those that are."""
        text = f"{self.repo_id} has no revision {shown(wanted)} on the Hub"
        if _GIT_ID.fullmatch(wanted):
            text += " (commits go when they are squashed)"
        names = self._revisions()
        if not names:
            main = "" if wanted == "main" else "leave it out for the main branch, or "
            return DownloadError(f"{text}: {main}check what its page lists.")
        known = ", ".join(map(shown, names[:_NAMED]))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return DownloadError(f"{text}: it has {known}{more}; use one of them.")

    def _revisions(self) -> list[str]:
        """Branches, the main one first, and tags; none where the Hub does not tell. (The library has no time
        limit for this request.)"""
        try:
            url = f"{self.endpoint}/api/models/{self.repo_id}/refs"
            response = hub_session().get(url, headers=self.headers(), timeout=METADATA_TIMEOUT_S)
            check_status(response)
            refs = json.loads(response.content.decode("utf-8"))
            names = [str(ref["name"]) for kind in ("branches", "tags") for ref in refs[kind]]
        except (*NETWORK_ERRORS, *NO_SENSE):
            return []
        return sorted(names, key=lambda name: name != "main")

    def _commit(self, info: ModelInfo) -> str:
        if not info.sha or not isinstance(info.sha, str):
            raise DownloadError(f"The Hub names no commit for {self.repo_id}: try again later.")
        return info.sha

    def _file(self, sibling: RepoSibling) -> RemoteFile:
        name, large = sibling.rfilename, sibling.lfs
        size, digest = (sibling.size, sibling.blob_id) if large is None else (large.size, large.sha256)
        pattern = _GIT_ID if large is None else _SHA256  # becomes part of a file's name: nothing but hex
        if not isinstance(size, int) or size < 0 or digest is None or not pattern.fullmatch(digest):
            raise DownloadError(
                f"The Hub gives no size or checksum for {shown(name)} of {self.repo_id}: try again later."
            )
        return RemoteFile(name, size, digest, "git" if large is None else "sha256")


def licence_of(info: ModelInfo) -> str:
    """The licence that a repo's card or tags name; "" if none is."""
    card = info.card_data
    named = getattr(card, "license", None) if card is not None else None
    if isinstance(named, str) and named != "other":
        return named[:60]
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    other = getattr(card, "license_name", None) if card is not None else None
    return (other if isinstance(other, str) else tags[0] if tags else "")[:60]
