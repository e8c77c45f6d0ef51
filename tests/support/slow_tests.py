"""Which tests a plain run leaves out: those marked slow, or all but their first cases (`slow(but=2)`).
Whoever asks for all, or names files or tests, gets all of them. Knows no test by name."""

from __future__ import annotations

from collections import Counter

import pytest


def is_plain(config: pytest.Config) -> bool:
    """Whether nobody chose tests on the command line. Those that failed last (--lf) may be slow ones."""
    option = config.option
    chosen = option.all or option.keyword or "slow" in option.markexpr or config.getoption("lf", False)
    return not chosen and config.args_source is pytest.Config.ArgsSource.TESTPATHS


def leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them."""
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        mark = item.get_closest_marker("slow")
        function = item.nodeid.partition("[")[0]
        seen[function] += 1
        stays = mark is None or seen[function] <= mark.kwargs.get("but", 0)
        (kept if stays else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
