"""The address of the Hub that HF_ENDPOINT names. Needs no library of the Hub's, as none can be imported while
that is not even the text of an address."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from localmoe.core.errors import DownloadError


def check_hub_address() -> None:
    """See that huggingface_hub can be imported.

    Raises:
        DownloadError: HF_ENDPOINT cannot be read as an address.
    """
    address = os.environ.get("HF_ENDPOINT", "")
    try:
        urlsplit(address)
    except ValueError as error:
        raise _refusal(address) from error


def hub_address(default: str) -> str:
    """HF_ENDPOINT, or the default where it is unset or empty; without a slash at its end.

    Raises:
        DownloadError: it is no address of a server.
    """
    address = (os.environ.get("HF_ENDPOINT") or default).rstrip("/")
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise _refusal(address) from error
    if not is_address:
        raise _refusal(address)
    return address


def _refusal(address: str) -> DownloadError:
    return DownloadError(
        f"HF_ENDPOINT is {address!r}, which is no address of a Hub: set it to one such as "
        "https://huggingface.co, or unset it."
    )
