"""How many random examples a plain run tries. Knows no test by name."""

from __future__ import annotations

import hypothesis
import pytest

FEW = 8  # where a test asks for no more, each takes long


def try_half(items: list[pytest.Item]) -> None:
    """Of what tests of random examples ask for: each run draws others, and --all tries all."""
    methods = [getattr(item, "obj", None) for item in items]
    for function in {getattr(method, "__func__", method) for method in methods}:
        asked = getattr(function, "_hypothesis_internal_use_settings", None)  # there is no public name
        if asked is not None:
            fewer = hypothesis.settings(asked, max_examples=half_of(asked.max_examples))
            function._hypothesis_internal_use_settings = fewer


def half_of(examples: int) -> int:
    return examples if examples <= FEW else max(FEW, examples // 2)
