"""HTTP clients for the Hub, as the environment sets them up (proxies, certificates, the Hub's address); a
setting that cannot be used is a sentence. Sends nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, get_async_session, get_session

from localmoe.core.errors import DownloadError, sentence_of
from localmoe.core.hub_address import hub_address
from localmoe.hub.http_errors import TRANSPORT_ERROR

_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
# of the HTTP client: no package for this kind of proxy, a kind that it does not know, a certificate file that
# is not there or is none, an address that is none
_UNUSABLE: tuple[type[Exception], ...] = (
    ImportError, ValueError, OSError, sys.modules[TRANSPORT_ERROR.__module__].InvalidURL,
)  # fmt: skip


def hub_endpoint() -> str:
    """The Hub's address, without a slash at its end.

    Raises:
        DownloadError: HF_ENDPOINT is no address.
    """
    return hub_address(constants.ENDPOINT)


def hub_session() -> Any:
    """huggingface_hub's HTTP client, which its own questions go through too.

    Raises:
        DownloadError: the network settings cannot be used.
    """
    with _usable_settings():
        return get_session()


def hub_async_session() -> Any:
    """A new asynchronous HTTP client of huggingface_hub, to be closed by the caller.

    Raises:
        DownloadError: the network settings cannot be used.
    """
    with _usable_settings():
        return get_async_session()


@contextmanager
def _usable_settings() -> Iterator[None]:
    try:
        yield
    except _UNUSABLE as error:
        found = [name for name in _NAMES if os.environ.get(name) or os.environ.get(name.lower())]
        named = ", ".join(found or ("HTTPS_PROXY", "SSL_CERT_FILE"))  # none: they are the system's
        raise DownloadError(
            f"The network settings ({named}) cannot be used ({sentence_of(error).rstrip('.')}): correct or "
            "unset them, and try again."
        ) from error
