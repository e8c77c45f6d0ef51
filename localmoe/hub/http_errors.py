"""Sorts what can go wrong between here and the Hub: worth another try, changed meanwhile, or a sentence for
the user. Tries nothing itself."""

from __future__ import annotations

import re
from typing import Any

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # exported when asked

from localmoe.core.errors import (
    DownloadError,
    GatedModelError,
    HubUnreachableError,
    RepoNotFoundError,
    sentence_of,
)
from localmoe.hub.token import hub_token

# what the HTTP client that huggingface_hub is built on (httpx or its successor) raises for a connection
TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
NETWORK_ERRORS = (TRANSPORT_ERROR, OfflineModeIsEnabled)
_QUERY = re.compile(r"""(https?://[^\s?'"]+)\?[^\s'"]*""")
_LOGIN = "set HF_TOKEN or run 'hf auth login'"


class TransientError(Exception):
    """May succeed when it is tried again. `wait_s`: what the server asked to wait, if it did."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class RemoteChangedError(Exception):
    """The Hub no longer has the file that the plan says."""


def check_status(response: Any) -> None:
    """Raise one of NETWORK_ERRORS if an HTTP answer is a refusal; its body has been read."""
    hf_raise_for_status(response)


def check_link(response: Any) -> None:
    """Raise TransientError if who refuses is the server that the Hub's link leads to, not the Hub: links
    expire and storage lags behind, and the Hub, asked again, gives another link."""
    if not response.history or "x-error-code" in response.headers:  # the Hub says why, also of a moved repo
        return
    status = int(response.status_code)
    if status in (401, 403):
        raise TransientError("the link that the Hub gave has expired")
    if status in (404, 410):
        raise TransientError(f"the link that the Hub gave leads nowhere (status {status})")


def public_sentence(error: BaseException) -> str:
    """An error as one sentence, without what follows a "?" in its addresses: for a while a signed link lets
    anybody read the file."""
    return _QUERY.sub(r"\1", sentence_of(error))


def sorted_error(repo_id: str, error: Exception) -> Exception:
    """The TransientError, RemoteChangedError or DownloadError that one of NETWORK_ERRORS amounts to."""
    if isinstance(error, OfflineModeIsEnabled):
        return HubUnreachableError(f"{repo_id} cannot be downloaded while HF_HUB_OFFLINE is set: unset it.")
    if isinstance(error, GatedRepoError):
        return gated_error(repo_id)
    if isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError):
        return RemoteChangedError(public_sentence(error))
    if isinstance(error, RepositoryNotFoundError):
        return RepoNotFoundError(
            f"The Hub has no model {repo_id} that you may see: check the name, or, if it is private, "
            f"{_LOGIN}."
        )
    if isinstance(error, HfHubHTTPError):
        return _status_error(repo_id, error)
    return TransientError(f"connection lost ({type(error).__name__})")


def gated_error(repo_id: str) -> GatedModelError:
    """The sentence for a repo whose owner decides who may download it."""
    page = f"https://huggingface.co/{repo_id}"
    if hub_token() is None:
        return GatedModelError(f"{repo_id} is gated: ask for access on {page}, then {_LOGIN}.")
    return GatedModelError(
        f"{repo_id} is gated and your token has no access to it: ask for access on {page}, or use "
        "another token."
    )


def _status_error(repo_id: str, error: HfHubHTTPError) -> Exception:
    status = int(error.response.status_code)
    if status in (408, 429) or status >= 500:
        asked = str(error.response.headers.get("retry-after", "")).strip()
        return TransientError(f"the server answered {status}", float(asked) if asked.isdecimal() else None)
    if status in (401, 403):
        return DownloadError(
            f"The Hub refuses {repo_id} to you (status {status}): check that your token is valid and may "
            f"read it ({_LOGIN})."
        )
    if status == 404:
        return RemoteChangedError(public_sentence(error))
    return DownloadError(f"The Hub refused {repo_id} with status {status}: {public_sentence(error)}")
