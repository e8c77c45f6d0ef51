"""Numbers of programs and of padded places, as hosts count them for each launch: Triton's own functions for
it are made for kernels, and take microseconds on a host.
"""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Pieces of `size` that `count` makes, the last one begun."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (count - 1).bit_length()
