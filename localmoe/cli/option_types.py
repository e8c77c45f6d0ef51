"""Texts of options to values, with the errors that argparse shows. Knows no command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from localmoe.core.config import parse_draft_length
from localmoe.core.errors import ConfigError

T = TypeVar("T")


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """argparse shows a ConfigError's sentence as a usage error (exit code 2)."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def draft_lengths(text: str) -> tuple[int | str, ...]:
    """ "0,4,auto".

    Raises:
        ConfigError: one of them is no draft length.
    """
    return tuple(parse_draft_length(part) for part in text.split(","))


def fixed_draft_lengths(text: str) -> tuple[int, ...]:
    """ "0,4".

    Raises:
        ConfigError: one of them is no number of tokens.
    """
    lengths = draft_lengths(text)
    if "auto" in lengths:
        raise ConfigError("Draft length auto needs times that are measured: give numbers, such as 0,4.")
    return tuple(int(length) for length in lengths)


def at_least(least: int) -> Callable[[str], int]:
    """A parser of numbers from `least` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"'{text}' is not a number: use a whole number from {least} on.") from None
        if value < least:
            raise ConfigError(f"{value} is out of range: use at least {least}.")
        return value

    return parse
