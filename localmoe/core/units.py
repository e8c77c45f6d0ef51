"""Parse and print sizes and speeds ("12GiB", "2GB/s"). Knows nothing of what they measure."""

from __future__ import annotations

import math
import re

from localmoe.core.errors import ConfigError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
# "Gb", "Gbit", "Gbps", "60 bit": networks are rated in bits; an all-lower-case "gb" is a careless GB
_BITS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTkmgt]i?)?(?:[Bb]its?|bps)|([KMGT]i?)?b)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of "12GiB", "800 MB" or "4096".

    Raises:
        ConfigError: the text is no size, or the size is zero.
    """
    match = _NUMBER.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"'{text}' is not a size: write for example 12GiB, 800MB or 4096.")
    value = float(match.group(1)) * factor
    if not math.isfinite(value) or not 1 <= value < 2**60:
        raise ConfigError(f"'{text}' is out of range: a size lies between 1 byte and 1 EiB.")
    return int(value)


def typed_size(num_bytes: int) -> str:
    """A size as a user would type it, not more than it is."""
    return f"{num_bytes >> 20}MiB" if num_bytes >= 64 << 20 else str(num_bytes)


def parse_speed(text: str) -> float:
    """Bytes a second of "2GB/s" (the "/s" may be left out, the unit may not).

    Raises:
        ConfigError: the text is no speed, names no unit, or is in bits.
    """
    bare = text.strip()
    bare = bare[:-2] if bare.lower().endswith("/s") else bare
    bits = _BITS.fullmatch(bare)
    if bits is not None and math.isfinite(float(bits.group(1))):
        unit = f"{(bits.group(2) or bits.group(3) or '').capitalize()}B/s"
        raise ConfigError(
            f"'{text}' is a speed in bits: write it in bytes, as {float(bits.group(1)) / 8:g}{unit}."
        )
    number = _NUMBER.fullmatch(bare)
    if number is not None and not number.group(2):
        raise ConfigError(
            f"'{text}' is not a speed, as it names no unit: write for example 25GB/s or 500MB/s."
        )
    try:
        return float(parse_bytes(bare))
    except ConfigError:
        raise ConfigError(f"'{text}' is not a speed: write for example 2GB/s or 500MB/s.") from None


def format_bytes(num_bytes: float) -> str:
    """Human form in binary units, e.g. "11.3 GiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_rate(bytes_per_s: float) -> str:
    """Human form in decimal units, as links are rated, e.g. "2.0 GB/s"."""
    value = float(bytes_per_s)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.1f} {unit}/s"
        value /= 1000
    return f"{value:.1f} TB/s"


def format_count(count: int) -> str:
    """Human form of a parameter count, e.g. "14.3 B"."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Human form of a duration that need not be exact, e.g. "45 s", "3 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def size_at_least(num_bytes: int) -> str:
    """A size that a user can type, rounded up so that it suffices."""
    unit, name = (1 << 20, "MiB") if num_bytes >= 64 << 20 else (1 << 10, "KiB")
    return f"{-(-num_bytes // unit)}{name}"


def typed_at_least(num_bytes: int) -> int:
    """The bytes that `size_at_least` names."""
    unit = 1 << 20 if num_bytes >= 64 << 20 else 1 << 10
    return -(-num_bytes // unit) * unit


def size_at_most(num_bytes: int) -> str:
    """A size that a user can type, rounded down so that it still fits."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= 64 * unit:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)
