"""Threads for what blocks beside an event loop: disk, names, questions. Does not decide what runs in them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class BackgroundPool(ThreadPoolExecutor):
    """A pool whose end nobody waits for, so that stopping never hangs on a silent server or a slow disk.

    As the loop's default executor it also looks up host names; `asyncio.run` would wait for those.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work and drop what has not begun; what runs ends by itself."""
        super().shutdown(wait=False, cancel_futures=True)
