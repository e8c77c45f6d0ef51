"""The user's access token for the Hub: kept by localmoe in a file that only the user can read, or found where
huggingface_hub keeps one. Sends it nowhere."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, get_token

from localmoe.core.errors import ConfigError
from localmoe.core.home import localmoe_home
from localmoe.core.whole_file import sync_folder

_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_FORM = re.compile(r"[\x21-\x7e]{8,200}")  # becomes an HTTP header: one visible ASCII word
_HEADER = re.compile(r"[\x21-\x7e]+")  # those of others may be longer


def token_path() -> Path:
    """Where `save_token` keeps it."""
    return localmoe_home() / "hub-token"


def hub_token() -> str | None:
    """The token to use: the environment's, else the one kept here, else huggingface_hub's own.

    Raises:
        ConfigError: huggingface_hub's cannot be read, or what stands there, or in the environment, is none.
    """
    named = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if named is not None:
        return _checked(get_token(), f"{named} says")
    return _kept() or _checked(_foreign(), f"{constants.HF_TOKEN_PATH} holds")


def token_hint() -> str:
    """Where the token in use comes from and its last four characters, never more; "" without one."""
    token = hub_token()
    if token is None:
        return ""
    if any(os.environ.get(name) for name in _VARIABLES):
        place = "environment"
    else:
        place = "localmoe" if _kept() else "huggingface_hub"
    return f"{place} …{token[-4:]}"


def save_token(text: str) -> None:
    """Keep a token, readable by this user alone.

    Raises:
        ConfigError: it does not look like a token, or cannot be written; the text does not repeat it.
    """
    token = text.strip()
    if not _FORM.fullmatch(token):
        raise ConfigError("This is no access token: paste one word of 8 to 200 letters, such as hf_...")
    path = token_path()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(token)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"The token cannot be kept in {path.parent} ({error.strerror}).") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def forget_token() -> None:
    """Delete the token that is kept here."""
    token_path().unlink(missing_ok=True)
    _remove_unfinished()


def _remove_unfinished() -> None:
    """Delete what a kill left of `save_token`: whole tokens, too."""
    for path in token_path().parent.glob(f".{token_path().name}.*.tmp"):
        path.unlink(missing_ok=True)


def _foreign() -> str | None:
    try:
        return get_token()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"huggingface_hub's token in {constants.HF_TOKEN_PATH} cannot be read ({reason}): make that file "
            "readable, or delete it."
        ) from error


def _checked(token: str | None, where: str) -> str | None:
    if token is not None and not _HEADER.fullmatch(token):
        raise ConfigError(
            f"What {where} is no access token for the Hub: one is a single word of plain letters, such as "
            "hf_..."
        )
    return token


def _kept() -> str | None:
    try:
        token = token_path().read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return token if _FORM.fullmatch(token) else None
