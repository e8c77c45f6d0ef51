"""What a server is told at its start, checked. Binds nothing and reads no environment."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from localmoe.core.config import SamplingConfig, Thinking
from localmoe.core.errors import ConfigError

DEFAULT_PORT = 8080
DEFAULT_MAX_WAITING = 16
DEFAULT_SAMPLING = SamplingConfig()
_UNSENDABLE = re.compile("[\0-\x08\n-\x1f\x7f\ud800-\udfff]")  # in a header; surrogates are no UTF-8
MAX_BODY_BYTES = 64 << 20  # of a request with pictures
MAX_TEXT_BYTES = 8 << 20  # beside pictures: far more text than any context holds


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server treats its clients.

    Attributes:
        api_key: what they have to know; None lets in every program of this computer.
        cors: origins of pages that may ask from a browser; "*" is any.
        max_waiting: requests that wait beside the one that is answered.
        sampling, thinking: what holds where a request says nothing.
    """

    api_key: str | None = field(default=None, repr=False)
    cors: tuple[str, ...] = ()
    max_waiting: int = DEFAULT_MAX_WAITING
    sampling: SamplingConfig = DEFAULT_SAMPLING
    thinking: Thinking = "auto"

    def __post_init__(self) -> None:
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise ConfigError("The API key is empty, or begins or ends with a space: give another.")
        if self.api_key is not None and (bad := _UNSENDABLE.search(self.api_key)):
            raise ConfigError(f"The API key holds {bad[0]!a}, which no client can send: give another.")
        if self.max_waiting < 0:
            raise ConfigError(f"{self.max_waiting} waiting requests are out of range: use 0 or more.")
        for origin in self.cors:
            if origin != "*" and not is_origin(origin):
                raise ConfigError(
                    f"'{origin}' is no origin of a page: write it as http://localhost:3000, without a path."
                )
        if "*" in self.cors and self.api_key is None:
            raise ConfigError("--cors '*' lets every page of the web ask: give an --api-key too.")


def is_origin(text: str) -> bool:
    """Whether `cors` may name it."""
    if text == "null":  # pages of files and of sandboxes, whoever wrote them
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False
