"""Texts from outside that are no Unicode: with a lone surrogate, which no file and no page could take. A
text is mended; a folder's name is refused, as a mended one would be another folder's."""

from __future__ import annotations

from localmoe.core.errors import ConfigError


def whole_unicode(text: str) -> str:
    """The text with a question mark for each lone surrogate."""
    return text.encode("utf-8", "replace").decode("utf-8")


def check_unicode(what: str, name: str) -> None:
    """Raise ConfigError if the name has lone surrogates, as that of a folder made under another encoding
    has."""
    if whole_unicode(name) != name:
        raise ConfigError(
            f"The name of the {what}, {whole_unicode(name)[:200]}, is no Unicode text: rename the folder, "
            "then choose it again."
        )
